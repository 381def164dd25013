"""A safetensors file read by position: the header is parsed and checked, then only the bytes asked for are read.

Format: 8 bytes little-endian header length, a JSON header name -> {dtype, shape, data_offsets}, then the data.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

DTYPES = {
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 256 << 20


class TensorFileError(ValueError):
    """A safetensors file that is damaged or cut short: names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Absolute byte offset in the file."""
    nbytes: int


class TensorFile:
    """An open safetensors file. `requested` lists every (offset, length) read after the header, for tests and rates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requested: list[tuple[int, int]] = []
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise TensorFileError(f"{path}: no such file; download the checkpoint again") from error
        try:
            self.entries = self._parse()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Tensor:
        """The tensor, or entries `start .. start + length - 1` of its dimension `dim`; reads no other bytes."""
        entry = self.entries[name]
        if dim is None or length == entry.shape[dim]:
            return self._rows(entry, 0, entry.nbytes).view(entry.shape)
        outer = math.prod(entry.shape[:dim])
        inner = math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize
        shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
        stride, size = entry.shape[dim] * inner, length * inner
        target = torch.empty(outer * size, dtype=torch.uint8)
        view = memoryview(target.numpy())
        for row in range(outer):
            self._read_into(entry.start + row * stride + start * inner, view[row * size : (row + 1) * size])
        return target.view(entry.dtype).view(shape)

    def _rows(self, entry: Entry, offset: int, nbytes: int) -> Tensor:
        target = torch.empty(nbytes, dtype=torch.uint8)
        self._read_into(entry.start + offset, memoryview(target.numpy()))
        return target.view(entry.dtype)

    def _read_into(self, offset: int, view: memoryview) -> None:
        self.requested.append((offset, len(view)))
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise TensorFileError(f"{self.path}: ends at byte {offset + done}, {len(view) - done} bytes too early")
            done += count

    def _parse(self) -> dict[str, Entry]:
        size = os.fstat(self._fd).st_size
        head = os.pread(self._fd, 8, 0)
        if len(head) < 8:
            raise TensorFileError(f"{self.path}: {size} bytes is too short for a safetensors file; download it again")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _MAX_HEADER):
            raise TensorFileError(
                f"{self.path}: header of {length} bytes in a file of {size}; it is cut short or damaged"
            )
        try:
            header = json.loads(os.pread(self._fd, length, 8))
        except ValueError as error:
            raise TensorFileError(f"{self.path}: the header is not JSON ({error}); the file is damaged") from error
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, raw, 8 + length) for name, raw in header.items()}
        end = max((entry.start + entry.nbytes for entry in entries.values()), default=8 + length)
        if end != size:
            raise TensorFileError(f"{self.path}: {size} bytes, but its header describes {end}; download it again")
        return entries

    def _entry(self, name: str, raw: object, base: int) -> Entry:
        try:
            assert isinstance(raw, dict)
            dtype, shape, (start, end) = DTYPES[raw["dtype"]], tuple(map(int, raw["shape"])), raw["data_offsets"]
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise TensorFileError(f"{self.path}: bad header entry for {name}: {raw!r}") from error
        nbytes = math.prod(shape) * dtype.itemsize
        if end - start != nbytes:
            raise TensorFileError(
                f"{self.path}: {name} takes {end - start} bytes, but {dtype} {list(shape)} needs {nbytes}"
            )
        return Entry(dtype, shape, base + start, nbytes)


def write_tensor_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` in the given order, flushed to the disk before this returns."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
