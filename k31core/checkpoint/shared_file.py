"""One safetensors file written by many processes: the first lays it out, each writes the slices it owns in place.

So nobody holds, or sends, more than its own part, and the file is an ordinary safetensors file when all are done.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from k31core.checkpoint.tensor_file import NAMES, Entry, TensorFile
from k31core.parallel.sharding import Slot


def lay_out(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Create the file with its header and its full length (reserved on the disk, so a full disk shows here)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(shapes):
        end = offset + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.flush()
        if offset:
            os.posix_fallocate(file.fileno(), 0, 8 + len(encoded) + offset)
        os.fsync(file.fileno())


def write_slices(path: Path, slots: Iterable[Slot]) -> None:
    """Write every slot's part at its place, flushed to the disk before this returns."""
    with TensorFile(path) as file:
        entries = file.entries
    fd = os.open(path, os.O_WRONLY)
    try:
        for slot in slots:
            _write_slice(fd, entries[slot.name], slot)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_slice(fd: int, entry: Entry, slot: Slot) -> None:
    data = _bytes_of(slot.tensor.to(entry.dtype))
    shard = slot.shard
    if shard.whole or shard.dim is None:
        _write_at(fd, entry.start, data)
        return
    inner = math.prod(entry.shape[shard.dim + 1 :]) * entry.dtype.itemsize
    stride, size = entry.shape[shard.dim] * inner, shard.length * inner
    for row in range(math.prod(entry.shape[: shard.dim])):
        _write_at(fd, entry.start + row * stride + shard.start * inner, data[row * size : (row + 1) * size])


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _write_at(fd: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
