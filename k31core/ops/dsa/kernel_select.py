"""Index scores and selection on a GPU, a block of queries at a time: no `[T, T]` tensor exists.

1. `_scores`: one tile of queries x keys, all index heads, on the tensor cores; each score is stored as an int32
whose order is
   the order of the scores (-0.0 as 0.0), so that everything after it is exact integer work.
2. `_select`: one query a program finds its k-th best key bit by bit (two bits a pass, counting), drops the ties with
the
   smallest indices, and writes the chosen key rows in ascending order.
The workspace is `WORKSPACE` int32 whatever the context length is.
"""

import torch
import triton
import triton.language as tl

from k31core.ops.dsa.reference import causal_ranges

WORKSPACE = 1 << 24
"""Scores that exist at one time (64 MiB)."""
TILE_Q = 128
TILE_K = 128
IN_REGISTERS = 16384
"""Keys of a row that `_select` keeps in registers between its passes; longer rows are read again in each pass."""


@triton.jit
def _scores(
    q, k, w, key_start, key_end, out, first_query, queries, low, keys, topk, stride_out, scale,
    HEADS: tl.constexpr, D: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    key = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    inside = query < queries
    start = tl.load(key_start + first_query + query, mask=inside, other=0x7FFFFFFF)
    end = tl.load(key_end + first_query + query, mask=inside, other=-1)
    scored = (end - start > topk) & inside
    begin = low + tl.program_id(1) * TILE_K
    if tl.max(tl.where(scored, end, -1), 0) <= begin:
        return
    if tl.min(tl.where(scored, start, 0x7FFFFFFF), 0) >= begin + TILE_K:
        return
    width = tl.arange(0, D)
    row = (first_query + query).to(tl.int64)
    real = key < keys
    key_tile = tl.load(k + (low + key).to(tl.int64)[None, :] * D + width[:, None], mask=real[None, :], other=0.0)
    total = tl.zeros([TILE_Q, TILE_K], dtype=tl.float32)
    for head in range(HEADS):
        tile = tl.load(q + (row * HEADS + head)[:, None] * D + width[None, :], mask=inside[:, None], other=0.0)
        weight = tl.load(w + row * HEADS + head, mask=inside, other=0.0).to(tl.float32)
        total += tl.maximum(tl.dot(tile, key_tile), 0.0) * weight[:, None]
    total = total * scale
    bits = tl.where(total == 0.0, 0, total.to(tl.int32, bitcast=True))
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    at = query.to(tl.int64)[:, None] * stride_out + key[None, :]
    tl.store(out + at, bits, mask=inside[:, None] & real[None, :])


@triton.jit
def _count(row, n, x, bound, LOW: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr):
    """How many of the row's n keys are >= bound."""
    if SINGLE:
        count = tl.sum((x >= bound).to(tl.int32), 0)
    else:
        count = 0
        for begin in range(0, n, TILE):
            at = begin + tl.arange(0, TILE)
            count += tl.sum((tl.load(row + at, mask=at < n, other=LOW) >= bound).to(tl.int32), 0)
    return count


@triton.jit
def _select(
    scores, key_start, key_end, out, first_query, low, topk, stride,
    TILE: tl.constexpr, SINGLE: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = -0x80000000
    query = tl.program_id(0)
    start = tl.load(key_start + first_query + query)
    n = tl.load(key_end + first_query + query) - start
    target = out + (first_query + query).to(tl.int64) * topk
    if n <= topk:
        for begin in range(0, topk, EMIT):
            at = begin + tl.arange(0, EMIT)
            tl.store(target + at, tl.where(at < n, start + at, -1), mask=at < topk)
    else:
        row = scores + query.to(tl.int64) * stride + (start - low)
        place = tl.arange(0, TILE)
        x = tl.load(row + place, mask=place < n, other=LOW)
        bound = tl.full([], LOW, tl.int32)
        count = n
        shift = 30
        while (shift >= 0) & (count != topk):
            step = tl.full([], 1, tl.int32) << shift
            high = bound + 2 * step  # int32 wraps: from the lowest key, 2 * 2**30 is 0
            count_high = _count(row, n, x, high, LOW, TILE, SINGLE)
            up = count_high >= topk
            bound = tl.where(up, high, bound)
            count = tl.where(up, count_high, count)
            middle = bound + step
            count_middle = _count(row, n, x, middle, LOW, TILE, SINGLE)
            up = count_middle >= topk
            bound = tl.where(up, middle, bound)
            count = tl.where(up, count_middle, count)
            shift -= 2
        # `bound` is the largest value with at least topk keys >= it; the surplus are ties of the smallest indices
        surplus = count - topk
        written = 0
        ties = 0
        for begin in range(0, n, EMIT):
            at = begin + tl.arange(0, EMIT)
            key = tl.load(row + at, mask=at < n, other=LOW)
            chosen = (key >= bound) & (at < n)
            if surplus > 0:
                tie = (chosen & (key == bound)).to(tl.int32)
                chosen = chosen & ((tie == 0) | (ties + tl.cumsum(tie, 0) > surplus))
                ties += tl.sum(tie, 0)
            one = chosen.to(tl.int32)
            slot = written + tl.cumsum(one, 0) - 1
            tl.store(target + slot, start + at, mask=chosen)
            written += tl.sum(one, 0)


@torch.no_grad()
def select_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    topk: int,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference: int32 `[Tq, topk]`. q `[Tq, Hi, d]`, k `[Tk, d]` bf16 (d a power of two), w `[Tq, Hi]`. One
    host sync."""
    queries, heads, width = q.shape
    q, k, w = q.contiguous(), k.contiguous(), w.contiguous()
    key_start, key_end = causal_ranges(cu_seqlens, rows)
    selected = torch.empty(queries, topk, dtype=torch.int32, device=q.device)
    for first, count, low, high, scored in _query_blocks(key_start, key_end, topk):
        span = high - low
        scores = torch.empty(count * span if scored else 1, dtype=torch.int32, device=q.device)
        if scored:
            grid = (triton.cdiv(count, TILE_Q), triton.cdiv(span, TILE_K))
            _scores[grid](
                q, k, w, key_start, key_end, scores, first, count, low, span, topk, span, width**-0.5 * heads**-0.5,
                HEADS=heads, D=width, TILE_Q=TILE_Q, TILE_K=TILE_K, num_warps=8, num_stages=3,
            )  # fmt: skip
        tile = min(triton.next_power_of_2(max(span, 1024)), IN_REGISTERS)
        _select[(count,)](
            scores, key_start, key_end, selected, first, low, topk, span,
            TILE=tile, SINGLE=span <= tile, EMIT=min(tile, 4096), num_warps=max(1, min(16, tile // 512)),
        )  # fmt: skip
    return selected


def _query_blocks(key_start: torch.Tensor, key_end: torch.Tensor, topk: int) -> list[tuple[int, int, int, int, bool]]:
    """[(first query, queries, first key, end key, any query with more than topk keys)] that cover all queries."""
    queries = len(key_start)
    unit = TILE_Q
    padded = -(-queries // unit) * unit - queries
    start = torch.nn.functional.pad(key_start, (0, padded), value=2**31 - 1).view(-1, unit)
    end = torch.nn.functional.pad(key_end, (0, padded), value=-1).view(-1, unit)
    crowded = torch.nn.functional.pad(key_end - key_start, (0, padded), value=-1).view(-1, unit).amax(1)
    table = torch.stack([start.amin(1), end.amax(1), crowded], 1).tolist()
    blocks: list[tuple[int, int, int, int, bool]] = []
    for index, (low, high, most) in enumerate(table):
        first, count, scored = index * unit, min(unit, queries - index * unit), most > topk
        if blocks:
            before = blocks[-1]
            joined = (before[0], before[1] + count, min(before[2], low), max(before[3], high), scored)
            fits = not scored or joined[1] * (joined[3] - joined[2]) <= WORKSPACE
            if before[4] == scored and fits:
                blocks[-1] = joined
                continue
        blocks.append((first, count, low, high, scored))
    return blocks
