"""The frozen weights of one trainer rank: the native checkpoint as published, or BF16 from a torch_dist directory."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k31core.checkpoint.fingerprint import checkpoint_fingerprint
from k31core.checkpoint.native import LoadReport, NativeCheckpoint
from k31core.checkpoint.torch_dist import load_torch_dist
from k31core.model.config import ModelConfig
from k31core.model.decoder import Decoder
from k31core.model.weight_names import (
    IGNORED_PREFIXES,
    base_slots,
    check_layer_list,
    dense_expert_slots,
    expected_names,
)
from k31core.parallel.groups import init_process_group
from k31core.parallel.sharding import Slot


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """What identifies a model in a torch_dist directory."""
    return {
        "format": 1,
        "family": config.family,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_experts": config.num_experts,
        "vocab_size": config.vocab_size,
        "mla_layers": list(config.mla_layers),
    }


def bf16_slots(decoder: Decoder) -> list[Slot]:
    """Every frozen tensor of a decoder with BF16 experts."""
    return [*base_slots(decoder), *dense_expert_slots(decoder)]


def load_native(decoder: Decoder, model_dir: Path) -> LoadReport:
    """Fill a decoder with packed experts from the checkpoint as published; every name must match."""
    checkpoint = NativeCheckpoint(model_dir)
    check_layer_list(decoder.config, checkpoint.shard_of, str(model_dir))
    checkpoint.check_names(expected_names(decoder.config), IGNORED_PREFIXES)
    return checkpoint.load(base_slots(decoder))


def load_reference(decoder: Decoder, directory: Path, source: Path | None = None) -> LoadReport:
    """Fill a decoder with BF16 experts from a torch_dist directory, at the decoder's own layout (collective).

    source: the MXFP4 checkpoint it must have been made from. Raises TorchDistError.
    """
    slots = bf16_slots(decoder)
    begun = time.perf_counter()
    facts = model_facts(decoder.config)
    if source is not None:
        facts["source"] = checkpoint_fingerprint(source)
    with _some_group():
        load_torch_dist(directory, slots, decoder.build.mesh, facts)
    # megatron-core reads the files; which ranges it asked for is not seen here, so the tensors' bytes stand for them.
    ranges = [(0, slot.tensor.numel() * slot.tensor.element_size()) for slot in slots]
    return LoadReport(len(slots), {directory.name: ranges}, time.perf_counter() - begun)


@contextmanager
def _some_group() -> Iterator[None]:
    """megatron-core's reader wants a process group, also for one process that trains without."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as scratch:
        init_process_group("gloo", f"file://{scratch}/store", 0, 1, timeout_minutes=10)
        try:
            yield
        finally:
            dist.destroy_process_group()
