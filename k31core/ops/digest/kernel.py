"""One Triton kernel that copies many tensors into (or out of) a bucket and digests them on the way.

The digest costs no extra pass: each word is read once, stored and mixed. The work is a table of pieces built once for a
set of tensors, so a sync is one launch a bucket whatever the number of tensors.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31core.ops.digest.value import FIRST, SECOND, STEP, THIRD

PIECE_WORDS = 8192
"""64-bit words a program handles."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_STEP = tl.constexpr(_signed(STEP))
_FIRST = tl.constexpr(_signed(FIRST))
_SECOND = tl.constexpr(_signed(SECOND))
_THIRD = tl.constexpr(_signed(THIRD))


@triton.jit
def _shift(v, BITS: tl.constexpr):
    """Logical right shift of int64."""
    return (v.to(tl.uint64, bitcast=True) >> BITS).to(tl.int64, bitcast=True)


@triton.jit
def _mix(word, position):
    """(low, high) terms of a word at a position, as `k31core.ops.digest.value` defines them."""
    z = word ^ ((position + 1) * _STEP)
    z = (z ^ _shift(z, 32)) * _FIRST
    z = z ^ _shift(z, 29)
    low = z * _SECOND
    high = z * _THIRD
    return low ^ _shift(low, 32), high ^ _shift(high, 32)


@triton.jit
def _copy_digest_kernel(
    table, bucket, sums, COPY: tl.constexpr, OUT: tl.constexpr, DIGEST: tl.constexpr,
    WIDE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0).to(tl.int64) * 5
    address = tl.load(entry)  # of the tensor's piece
    offset = tl.load(entry + 1)  # bytes into the bucket
    size = tl.load(entry + 2)  # bytes
    position = tl.load(entry + 3)  # word index within the tensor
    slot = tl.load(entry + 4)
    tensor_words = address.to(tl.pointer_type(tl.int64))
    if COPY:
        bucket_words = (bucket + offset).to(tl.pointer_type(tl.int64))
        source = bucket_words if OUT else tensor_words
        target = tensor_words if OUT else bucket_words
    else:
        source = tensor_words
        target = tensor_words
    if WIDE:  # both addresses are multiples of 16: two words an access
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    words = size // 8
    low = tl.zeros((BLOCK,), dtype=tl.int64)
    high = tl.zeros((BLOCK,), dtype=tl.int64)
    if words == PIECE:  # a whole piece: no mask, so that accesses stay wide
        for start in tl.static_range(0, PIECE, BLOCK):
            index = start + tl.arange(0, BLOCK)
            full = tl.load(source + index)
            if COPY:
                tl.store(target + index, full)
            if DIGEST:
                full_low, full_high = _mix(full, position + index)
                low += full_low
                high += full_high
    else:
        for start in tl.range(0, words, BLOCK):
            index = start + tl.arange(0, BLOCK)
            live = index < words
            part = tl.load(source + index, mask=live, other=0)
            if COPY:
                tl.store(target + index, part, mask=live)
            if DIGEST:
                part_low, part_high = _mix(part, position + index)
                low += tl.where(live, part_low, 0)
                high += tl.where(live, part_high, 0)
    low_sum = tl.sum(low, 0)
    high_sum = tl.sum(high, 0)
    rest = size - words * 8
    if rest > 0:  # the tensor's last bytes, fewer than a word
        lane = tl.arange(0, 8)
        some = lane < rest
        byte = tl.load(source.to(tl.pointer_type(tl.uint8)) + words * 8 + lane, mask=some, other=0)
        if COPY:
            tl.store(target.to(tl.pointer_type(tl.uint8)) + words * 8 + lane, byte, mask=some)
        if DIGEST:
            last = tl.sum(byte.to(tl.int64) << (lane * 8).to(tl.int64), 0)
            last_low, last_high = _mix(last, position + words)
            low_sum += last_low
            high_sum += last_high
    if DIGEST:
        # Integer sums do not depend on the order of the additions.
        tl.atomic_add(sums + slot * 2, low_sum, sem="relaxed")
        tl.atomic_add(sums + slot * 2 + 1, high_sum, sem="relaxed")


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What the kernel walks through."""

    table: Tensor
    """int64 `[pieces, 5]` on the device: address, bucket offset, bytes, first word, row of the sums."""
    wide: bool
    """Every address and offset is a multiple of 16."""


def plan_copies(entries: list[tuple[int, int, int, int]], device: torch.device) -> CopyPlan:
    """The plan for (address, bucket offset, bytes, first byte) entries; entry i adds to row i of the sums.

    Addresses and offsets are multiples of 8; multiples of 16 copy faster.
    """
    step = PIECE_WORDS * 8
    rows = [
        (address + start, offset + start, min(step, size - start), (first_byte + start) // 8, slot)
        for slot, (address, offset, size, first_byte) in enumerate(entries)
        for start in range(0, size, step)
    ]
    wide = all(address % 16 == 0 and offset % 16 == 0 for address, offset, _, _ in entries)
    return CopyPlan(torch.tensor(rows, dtype=torch.int64).reshape(-1, 5).to(device), wide)


def copy_and_digest(plan: CopyPlan, bucket: Tensor | None, sums: Tensor | None, *, out: bool = False) -> None:
    """Copy every piece into the bucket (out of it with `out`) and add its digest to sums int64 `[n, 2]`.

    Without a bucket the tensors are only digested, without sums only copied.
    """
    table = plan.table
    if not len(table):
        return
    _copy_digest_kernel[(len(table),)](
        table, bucket if bucket is not None else table, sums if sums is not None else table,
        COPY=bucket is not None, OUT=out, DIGEST=sums is not None, WIDE=plan.wide,
        PIECE=PIECE_WORDS, BLOCK=1024, num_warps=4,
    )  # fmt: skip
