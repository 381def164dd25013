"""Write a safetensors file tensor by tensor: the layout is fixed first, the data streams through, nothing is held.

The file is hashed while it is written, so that a 60 GB shard is not read a second time for its digest.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from k31core.checkpoint.tensor_file import NAMES, TensorFileError

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""name -> (dtype, shape), in the order of writing."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What was written."""

    size: int
    sha256: str


class TensorFileWriter:
    """Writes `path` in the order of `layout`; leaving the block without having written everything is an error."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self._pending = [(name, math.prod(shape) * dtype.itemsize) for name, (dtype, shape) in layout.items()]
        self._left = 0
        self._name = ""
        self._hash = hashlib.sha256()
        self._size = 0
        self._file = path.open("wb")
        self._put(_header(layout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def write(self, name: str, data: Tensor) -> None:
        """Append one whole tensor (or, called again with the same name, its next bytes)."""
        view = memoryview(data.detach().contiguous().view(-1).view(torch.uint8).numpy())
        if not self._left:
            self._name, self._left = self._pending.pop(0) if self._pending else ("", 0)
        if name != self._name or len(view) > self._left:
            raise TensorFileError(
                f"{self.path}: {len(view)} bytes of {name!r} were written where {self._left} bytes of "
                f"{self._name or 'nothing'!r} belong"
            )
        self._left -= len(view)
        self._put(view)

    def finish(self) -> WrittenFile:
        """Flush to the disk; raises TensorFileError when a tensor is missing."""
        pending = [name for name, nbytes in self._pending if nbytes]
        if self._left or pending:
            raise TensorFileError(f"{self.path}: {self._name if self._left else pending[0]!r} was not written whole")
        self._file.flush()
        os.fsync(self._file.fileno())
        return WrittenFile(self._size, self._hash.hexdigest())

    def _put(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)
        self._size += len(data)


def _header(layout: Layout) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded
