"""The digest's definition and its reference.

A tensor is its little-endian bytes, cut into 64-bit words w_0, w_1, ... (the last one padded with zero bytes). With all
arithmetic modulo 2^64:

    z = w_i xor ((i + 1) * STEP);   z = (z xor z >> 32) * FIRST;   z = z xor z >> 29
    low  = sum over i of f(z * SECOND)        f(v) = v xor v >> 32
    high = sum over i of f(z * THIRD)

The digest is (high, low, number of bytes): 128 bits that depend on every word's value and position. For a fixed
position each term is a bijection of the word, so a change of one word always shows. Sums commute, so blocks may be
added in any order and shards of one tensor combine, given where each begins. It finds damage, it does not resist an
adversary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
THIRD = 0xD6E8FEB86659FD93

_MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 18


@dataclass(frozen=True, slots=True)
class Digest:
    """128 bits and the number of bytes they stand for."""

    low: int
    high: int
    num_bytes: int

    def __add__(self, other: "Digest") -> "Digest":
        """The digest of two shards of one tensor, each computed with the position of its first byte."""
        total = self.num_bytes + other.num_bytes
        return Digest((self.low + other.low) & _MASK, (self.high + other.high) & _MASK, total)

    def hex(self) -> str:
        """48 hex digits: high, low, bytes."""
        return f"{self.high:016x}{self.low:016x}{self.num_bytes:016x}"


class DigestMismatch(ValueError):
    """Tensors that did not arrive as they were sent: names the first, and how many."""


def check_equal(sent: Mapping[str, Digest], received: Mapping[str, Digest]) -> None:
    """Raise `DigestMismatch` unless both sides have the same names and digests."""
    if sent.keys() != received.keys():
        odd = sorted(sent.keys() ^ received.keys())
        raise DigestMismatch(f"{len(odd)} tensors are on one side only, the first is {odd[0]!r}")
    wrong = [name for name in sent if sent[name] != received[name]]
    if wrong:
        first = wrong[0]
        raise DigestMismatch(
            f"{len(wrong)} of {len(sent)} tensors differ after the copy, the first is {first!r}: "
            f"sent {sent[first].hex()}, received {received[first].hex()}; send this version again"
        )


def digest_of_bytes(data: memoryview | bytes, first_byte: int = 0) -> Digest:
    """Digest of `data` that begins at byte `first_byte` (a multiple of 8) of its tensor."""
    if first_byte % 8:
        raise ValueError(f"a shard must begin at a multiple of 8 bytes, got {first_byte}")
    raw = np.frombuffer(data, dtype=np.uint8)
    whole = raw.size // 8
    low = high = 0
    for start in range(0, whole, _CHUNK_WORDS):
        words = raw[start * 8 : min(start + _CHUNK_WORDS, whole) * 8].view("<u8")
        part_low, part_high = _sums(words, first_byte // 8 + start)
        low, high = low + part_low, high + part_high
    if raw.size % 8:
        tail = np.zeros(8, dtype=np.uint8)
        tail[: raw.size % 8] = raw[whole * 8 :]
        part_low, part_high = _sums(tail.view("<u8"), first_byte // 8 + whole)
        low, high = low + part_low, high + part_high
    return Digest(low & _MASK, high & _MASK, raw.size)


def _sums(words: np.ndarray, first: int) -> tuple[int, int]:
    position = np.arange(first + 1, first + 1 + words.size, dtype=np.uint64)
    z = words ^ (position * np.uint64(STEP))
    z = (z ^ (z >> np.uint64(32))) * np.uint64(FIRST)
    z ^= z >> np.uint64(29)
    low, high = z * np.uint64(SECOND), z * np.uint64(THIRD)
    low ^= low >> np.uint64(32)
    high ^= high >> np.uint64(32)
    return int(low.sum(dtype=np.uint64)), int(high.sum(dtype=np.uint64))
