"""Adapters in PEFT's layout and back: what SGLang and other tools load.

A PEFT directory has `adapter_config.json` and `adapter_model.safetensors`, or, above a shard size, numbered shards with
`adapter_model.safetensors.index.json` (the Hub's convention). Names are ours behind `base_model.model.`, with
`mlp.experts` and `mlp.shared_experts` where the checkpoint says `block_sparse_moe`; expert factors stay 3-D, as
SGLang's shared outer LoRA expects them. Values are copied byte for byte in both directions.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from k31core.checkpoint.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterError,
    adapter_config_json,
    read_adapter_config,
)
from k31core.checkpoint.tensor_file import Entry, TensorFile
from k31core.checkpoint.tensor_writer import TensorFileWriter

INDEX_FILE = "adapter_model.safetensors.index.json"
_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")


def peft_name(name: str) -> str:
    """PEFT's name of a logical factor."""
    return _PREFIX + name.replace(".block_sparse_moe.", ".mlp.")


def logical_name(name: str) -> str:
    """Our name of a PEFT tensor. Raises AdapterError for one that is no LoRA factor of this family."""
    if not name.startswith(_PREFIX) or not name.endswith(_FACTORS):
        raise AdapterError(f"tensor {name!r} is no LoRA factor: expected {_PREFIX}….lora_A.weight or …lora_B.weight")
    logical = name.removeprefix(_PREFIX)
    if not logical.startswith("language_model."):
        logical = f"language_model.{logical}"
    for part in ("experts", "shared_experts"):
        logical = logical.replace(f".mlp.{part}.", f".block_sparse_moe.{part}.")
    for theirs, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        logical = logical.replace(f".block_sparse_moe.experts.{theirs}.", f".block_sparse_moe.experts.{ours}.")
    return logical


def export_peft(directory: Path, target: Path, *, shard_bytes: int = 5 * 10**9) -> list[Path]:
    """Write the adapter at `directory` as a PEFT directory `target`; returns the weight files.

    One tensor is in memory at a time. Raises AdapterError when the source is no adapter or the target exists.
    """
    config = read_adapter_config(directory)
    _new_directory(target)
    source = directory / WEIGHTS_FILE
    with TensorFile(source) as file:
        shards = list(_shards(file, shard_bytes))
        weight_map: dict[str, str] = {}
        written = []
        for number, names in enumerate(shards, start=1):
            shard = WEIGHTS_FILE if len(shards) == 1 else f"adapter_model-{number:05d}-of-{len(shards):05d}.safetensors"
            layout = {peft_name(name): (file.entries[name].dtype, file.entries[name].shape) for name in names}
            with TensorFileWriter(target / shard, layout) as writer:
                for name in names:
                    writer.write(peft_name(name), file.read(name))
                writer.finish()
            weight_map.update(dict.fromkeys(layout, shard))
            written.append(target / shard)
        total = sum(entry.nbytes for entry in file.entries.values())
        modules = sorted({_module(name) for name in file.entries})
    if len(shards) > 1:
        _write_json(target / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(
        target / CONFIG_FILE,
        adapter_config_json(replace(config, targets=tuple(modules))),
    )
    return written


def import_peft(directory: Path, target: Path) -> int:
    """Write the PEFT adapter at `directory` as one of ours; returns the number of tensors.

    `target_modules` becomes `all-linear`: which factors there are is said by the tensors, and a run that loads the
    adapter refuses a set that is not its own. Raises AdapterError by tensor, TensorFileError by file.
    """
    config = read_adapter_config(directory)
    files = _weight_files(directory)
    with ExitStack() as stack:
        opened = [stack.enter_context(TensorFile(path)) for path in files]
        origin: dict[str, tuple[TensorFile, str]] = {}
        for file in opened:
            for name in file.entries:
                logical = logical_name(name)
                if logical in origin:
                    raise AdapterError(f"{file.path}: {name} and {origin[logical][1]} both mean {logical}")
                origin[logical] = (file, name)
        _check_pairs(directory, origin)
        _new_directory(target)
        order = sorted(origin)
        layout = {}
        for logical in order:
            file, name = origin[logical]
            layout[logical] = (file.entries[name].dtype, file.entries[name].shape)
        with TensorFileWriter(target / WEIGHTS_FILE, layout) as writer:
            for logical in order:
                file, name = origin[logical]
                writer.write(logical, file.read(name))
            writer.finish()
    raw = json.loads((directory / CONFIG_FILE).read_text())
    raw |= {"r": config.rank, "lora_alpha": config.alpha, "target_modules": "all-linear"}
    _write_json(target / CONFIG_FILE, raw | {"experts_shared_outer_loras": True})
    return len(order)


def _shards(file: TensorFile, shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    ordered: list[tuple[str, Entry]] = sorted(file.entries.items())
    for name, entry in ordered:
        if names and size + entry.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += entry.nbytes
    if not names:
        raise AdapterError(f"{file.path}: holds no tensor; this is no adapter")
    yield names


def _module(name: str) -> str:
    module = name.rsplit(".", 3)[1]
    return {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(module, module)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        return [directory / WEIGHTS_FILE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{index}: not an index with a weight_map ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise AdapterError(f"{index}: weight_map names {name!r}, which is not a file of this directory")
    return [directory / name for name in names]


def _check_pairs(directory: Path, origin: dict[str, Any]) -> None:
    for name in origin:
        partner = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
        if partner not in origin:
            raise AdapterError(f"{directory}: {name} has no partner {partner}")


def _new_directory(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise AdapterError(f"{target} is not empty: choose a new directory")
    target.mkdir(parents=True, exist_ok=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
