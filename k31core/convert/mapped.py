"""Slots whose memory is the checkpoint's own file: mapped, not read, so that a conversion needs no memory for them."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from k31core.checkpoint.native import ALLOWED, NativeCheckpoint
from k31core.checkpoint.tensor_file import Entry, TensorFile
from k31core.convert.source import ConvertError
from k31core.parallel.sharding import Slot


def mapped_slots(checkpoint: NativeCheckpoint, slots: Sequence[Slot]) -> list[Slot]:
    """The same slots, each with this rank's part of the checkpoint's tensor as its memory, in the file's dtype.

    Pages come in on use, and only those of the part. A part that is cut out of rows (a TP split of dimension 1) is
    copied. Raises ConvertError, by file and tensor, for another shape or dtype.
    """
    by_shard: dict[str, list[Slot]] = {}
    for slot in slots:
        by_shard.setdefault(checkpoint.shard_of[slot.name], []).append(slot)
    found: dict[str, Slot] = {}
    for shard, members in by_shard.items():
        path = checkpoint.directory / shard
        memory = _map(path)
        with TensorFile(path) as file:
            for slot in members:
                found[slot.name] = Slot(slot.name, _part(file, memory, slot), slot.shard)
    return [found[slot.name] for slot in slots]


def _map(path: Path) -> mmap.mmap:
    """The file's bytes; private, so that nothing is ever written through it."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _part(file: TensorFile, memory: mmap.mmap, slot: Slot) -> Tensor:
    shard, entry = slot.shard, file.entries.get(slot.name)
    if entry is None:
        raise ConvertError(f"{file.path}: the index says {slot.name} is here, the file has no such tensor")
    shape = shard.shape if shard.zero_padded_to is None else (shard.zero_padded_to,)
    if entry.shape != shape or entry.dtype not in ALLOWED[shard.stored]:
        raise ConvertError(
            f"{file.path}: {slot.name} is {entry.dtype} {list(entry.shape)}, this model needs "
            f"{' or '.join(map(str, ALLOWED[shard.stored]))} {list(shape)}"
        )
    if shard.zero_padded_to is not None:
        used = shard.shape[0]
        if bool((_rows(memory, entry, used, shape[0] - used) != 0).any()):
            raise ConvertError(f"{file.path}: {slot.name} is not zero past its {used} heads")
    if shard.whole:
        return _rows(memory, entry, 0, shard.shape[0])
    if shard.dim == 0:
        return _rows(memory, entry, shard.start, shard.length)
    return shard.take(_rows(memory, entry, 0, shape[0])).contiguous()


def _rows(memory: mmap.mmap, entry: Entry, first: int, count: int) -> Tensor:
    """Rows of a tensor as a storage of exactly their size: the writer of torch_dist copies every view of a larger
    one."""
    row = entry.nbytes // entry.shape[0]
    if count * row == 0:
        return torch.empty(0, *entry.shape[1:], dtype=entry.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=entry.start + first * row, count=count * row)
    return flat.view(entry.dtype).view(count, *entry.shape[1:])
