"""The adapter of all ranks as logical tensors: its digest, and its export into one directory.

Every function here is a collective over all ranks; with one process nothing is communicated.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from k31core.checkpoint.adapter import AdapterConfig, write_adapter, write_adapter_together
from k31core.checkpoint.adapter_digest import LogicalDigest
from k31core.checkpoint.optimizer_state import OPTIMIZER_DIR, write_optimizer_state
from k31core.checkpoint.tensor_file import NAMES
from k31core.model.decoder import Decoder
from k31core.model.lora import adapter_shapes
from k31core.model.weight_names import adapter_slots
from k31core.parallel.ownership import gather_buckets, owned
from k31core.train.adamw import AdapterOptimizer


def world(decoder: Decoder) -> tuple[int, int]:
    """(rank, ranks) over the whole mesh."""
    mesh = decoder.build.mesh
    alone = mesh.stage.size * mesh.pp.size == 1
    return (0, 1) if alone else (dist.get_rank(), dist.get_world_size())


def adapter_digest(decoder: Decoder) -> str:
    """Digest of the logical factors as they lie in memory; the same for any layout and equal to that of an export."""
    digest = LogicalDigest()
    dtype = factor_dtype(decoder)
    shapes = _shapes(decoder)
    buckets = gather_buckets(
        {name: shapes[name] for name in sorted(shapes)},
        adapter_slots(decoder),
        decoder.build.mesh,
        dtype=dtype,
        device=decoder.build.device,
    )
    for bucket in buckets:
        for name, tensor in bucket:
            take = digest.begin(name, NAMES[dtype], tuple(tensor.shape))
            take(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export_adapter(
    decoder: Decoder, config: AdapterConfig, directory: Path, agree: Callable[[str | None], str | None]
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`; each rank writes the parts it owns.

    agree: waits for every rank and returns the first complaint of any of them.
    """
    rank, ranks = world(decoder)
    slots = adapter_slots(decoder)
    if ranks == 1:
        write_adapter(directory, config, {slot.name: slot.tensor.detach() for slot in slots})
        return
    write_adapter_together(
        directory,
        config,
        _shapes(decoder),
        owned(slots, decoder.build.mesh),
        dtype=factor_dtype(decoder),
        first=rank == 0,
        agree=agree,
    )


def export_optimizer(decoder: Decoder, optimizer: AdapterOptimizer, directory: Path) -> None:
    """Write the optimizer state this rank owns into `directory`/optimizer."""
    rank, ranks = world(decoder)
    slots = optimizer.state_slots()
    write_optimizer_state(
        directory / OPTIMIZER_DIR,
        slots if ranks == 1 else owned(slots, decoder.build.mesh),
        updates=optimizer.updates,
        writer=rank,
        writers=ranks,
    )


def factor_dtype(decoder: Decoder) -> torch.dtype:
    """Of the adapter's factors."""
    assert decoder.build.lora is not None
    return decoder.build.lora.dtype or decoder.build.dtype


def _shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    assert decoder.build.lora is not None
    return adapter_shapes(decoder.config, decoder.build.lora)
