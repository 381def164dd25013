"""Large sequential reads past the page cache, straight to where the bytes belong.

Buffered reads of a cold file copy everything twice and fill a host's memory with pages nobody needs again; direct
reads of 16 MiB, two in flight, keep the disk busy while the block before is copied out. A file system without direct
reads (tmpfs) is read through the page cache instead, said once in the log.
"""

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k31core.checkpoint.tensor_file import TensorFileError

log = logging.getLogger(__name__)

BLOCK = 16 << 20
"""Bytes read at a time."""
_ALIGN = 4096
_BUFFERS = 3
_IN_FLIGHT = 2
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of the file and where they go."""

    start: int
    target: Tensor
    """uint8 `[n]`, contiguous, on the CPU."""
    done: Callable[[], None]
    """Called when the target is filled."""

    @property
    def end(self) -> int:
        """First byte behind the piece."""
        return self.start + self.target.numel()


def extents(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """(start, length) of the byte ranges that the pieces, in file order, cover without a gap."""
    merged: list[tuple[int, int]] = []
    for piece in pieces:
        if merged and sum(merged[-1]) == piece.start:
            merged[-1] = (merged[-1][0], piece.end - merged[-1][0])
        else:
            merged.append((piece.start, piece.target.numel()))
    return merged


def stream(path: Path, pieces: Sequence[Piece]) -> None:
    """Fill every piece (sorted by start, not overlapping). Reads the extents, rounded out to 4 KiB, and nothing
    else."""
    blocks = list(_blocks(extents(pieces)))
    fd = _open(path)
    buffers = [mmap.mmap(-1, BLOCK + _ALIGN) for _ in range(_BUFFERS)]  # page-aligned
    try:
        with ThreadPoolExecutor(_IN_FLIGHT) as readers:
            reads: dict[int, Future[int]] = {}
            todo = _Filler(pieces)
            for number, (offset, length) in enumerate(blocks):
                for ahead in range(number, min(number + _BUFFERS, len(blocks))):
                    if ahead not in reads:
                        reads[ahead] = readers.submit(_read, fd, buffers[ahead % _BUFFERS], *blocks[ahead])
                got = reads.pop(number).result()
                todo.take(torch.frombuffer(buffers[number % _BUFFERS], dtype=torch.uint8), offset, got, length, path)
    finally:
        os.close(fd)


class _Filler:
    """Copies blocks, in file order, into the pieces they overlap."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._next = 0

    def take(self, block: Tensor, offset: int, got: int, length: int, path: Path) -> None:
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            low, high = max(piece.start, offset), min(piece.end, offset + length)
            if low >= high and piece.target.numel():
                return
            if high > offset + got:
                raise TensorFileError(f"{path}: ends at byte {offset + got}, {high - offset - got} bytes too early")
            piece.target[low - piece.start : high - piece.start].copy_(block[low - offset : high - offset])
            if high < piece.end:
                return
            piece.done()
            self._next += 1


def _blocks(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Aligned (offset, length) of at most `BLOCK`; neighbouring extents may share their border page."""
    for start, length in ranges:
        offset, end = start // _ALIGN * _ALIGN, start + length
        while offset < end:
            size = min(BLOCK, -(-(end - offset) // _ALIGN) * _ALIGN)
            yield offset, size
            offset += size


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        reason = f"{path.parent}: no direct reads on this file system, reading through the page cache"
        if reason not in _said:
            _said.add(reason)
            log.info(reason)
        return os.open(path, os.O_RDONLY)


def _read(fd: int, buffer: mmap.mmap, offset: int, length: int) -> int:
    """Bytes read into the buffer: fewer than `length` only at the end of the file."""
    view, done = memoryview(buffer), 0
    while done < length:
        count = os.preadv(fd, [view[done:length]], offset + done)
        done += count
        if count == 0 or count % _ALIGN:
            break  # the end of the file, which a direct read cannot start behind
    return done
