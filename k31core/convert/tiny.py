"""The tiny checkpoint's maker: a small model of the family, trained a little on sums, in the published layout."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from k31core.checkpoint.native import NativeCheckpoint, write_native_checkpoint
from k31core.convert.tiny_data import arithmetic_problems, split_problems
from k31core.convert.tiny_model import init_weights, tiny_config
from k31core.convert.tiny_pretrain import Measured, Progress, measure, pretrain
from k31core.convert.tiny_tokenizer import write_tokenizer
from k31core.model.build import Build, ExpertFormat
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import base_slots, native_tensors
from k31core.recipe.model import TinyCheckpoint

ACCURACY = (0.30, 0.65)
"""Sampled reward of the training problems that RL may start from: room to rise, and something to learn from."""
MIN_BOXED = 0.90
GATE_SAMPLES = {"train": 256, "heldout": 128}
MAKER_MANIFEST = "tiny.json"
_SHARD_BYTES = 512 * 1024
"""Small, so that the checkpoint has several shards like a real one."""


class TinyGateError(RuntimeError):
    """The made checkpoint is no start for RL: says what was measured and which field to change."""


def make_tiny_checkpoint(
    config: TinyCheckpoint,
    family: str,
    out_dir: Path,
    progress: Progress,
    *,
    gate_samples: Mapping[str, int] = MappingProxyType(GATE_SAMPLES),
) -> dict[str, Any]:
    """Pre-train and write a checkpoint directory (weights, `config.json`, tokenizer, `tiny.json`); returns `tiny.json`.

    family: `kimi_k31` or `kimi_k3`. gate_samples: answers sampled of each split for the gate. The same arguments give
    the same bytes on the same kind of processor. What is measured is the model as written: BF16 weights and MXFP4
    experts, read back from the files.
    Raises `TinyGateError` when the sampled reward or the share of boxed answers is outside the gate.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # bits depend on the thread count
    try:
        return _make(config, family, out_dir, progress, gate_samples)
    finally:
        torch.set_num_threads(threads)


def _make(
    config: TinyCheckpoint, family: str, out_dir: Path, progress: Progress, gate_samples: Mapping[str, int]
) -> dict[str, Any]:
    raw = tiny_config(family=family, hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers)
    parts = split_problems(arithmetic_problems(config.max_operand, config.seed), config.heldout_one_in)
    decoder = Decoder(parse_config(raw), Build(experts=ExpertFormat.DENSE, train_base=True))
    init_weights(decoder, config.seed)
    loss = pretrain(
        decoder,
        parts["train"],
        steps=config.steps,
        batch_size=config.batch_size,
        lr=config.lr,
        careful_share=config.careful_share,
        seed=config.seed,
        progress=progress,
    )
    write_native_checkpoint(out_dir, raw, native_tensors(decoder), shard_bytes=_SHARD_BYTES)
    write_tokenizer(out_dir)
    written = Decoder(parse_config(raw), Build())
    NativeCheckpoint(out_dir).load(base_slots(written), progress=False)
    results = {
        name: measure(written, parts[name], samples=gate_samples[name], seed=config.seed + offset)
        for offset, name in enumerate(("train", "heldout"), start=1)
    }
    train, heldout = results["train"], results["heldout"]
    progress(
        config.steps,
        config.steps,
        f"loss {loss:.3f}, sampled accuracy {train.accuracy:.3f} (held out {heldout.accuracy:.3f}), "
        f"boxed {train.boxed:.3f}",
    )
    _gate(train)
    manifest = {
        "kind": "tiny-checkpoint",
        "family": family,
        "config": config.model_dump(mode="json"),
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "pretraining_loss": round(loss, 6),
        "sampled": {name: asdict(result) for name, result in results.items()},
        "files": [
            {"path": path.name, "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in sorted(out_dir.iterdir())
            if path.is_file() and path.name != MAKER_MANIFEST
        ],
    }
    (out_dir / MAKER_MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return manifest


def _gate(measured: Measured) -> None:
    low, high = ACCURACY
    if measured.boxed < MIN_BOXED:
        raise TinyGateError(
            f"only {measured.boxed:.3f} of {measured.samples} sampled answers are boxed (at least {MIN_BOXED} needed): "
            "raise model.tiny.steps"
        )
    if not low <= measured.accuracy <= high:
        advice = "raise" if measured.accuracy < low else "lower"
        raise TinyGateError(
            f"sampled accuracy {measured.accuracy:.3f} of {measured.samples} answers is outside {low} to {high}: "
            f"{advice} model.tiny.steps or model.tiny.careful_share, or change model.tiny.seed"
        )
