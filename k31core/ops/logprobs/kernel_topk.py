"""The k best words of each row of logits on a GPU, without sorting the row.

1. One pass over the row: the best word of every group of `GROUP` neighbouring words, and the row's log-sum-exp in
parts. 2. The k best groups, ranked by their best word. A word outside them cannot be among the k best words: k words
beat it. 3. The k best words of those k groups.
Every comparison is on one int64 that holds the logit's order and, below it, the complemented id: no ties, smaller id
first.
"""

import torch
import triton
import triton.language as tl

GROUP = 64
"""Words a group; step 2 sorts V / 64 keys a row and step 3 64 k."""
TILE = 4096
"""Words a program of step 1 handles; one part of the log-sum-exp."""


@triton.jit
def _ordered(x, word):
    """int64 keys whose order is (value, then smaller word); -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - word).to(tl.int64)


@triton.jit
def _groups(logits, keys, tops, totals, words, tiles, groups, stride, TILE: tl.constexpr, GROUP: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + word, mask=word < words, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * tiles + tile, top)
    tl.store(totals + row * tiles + tile, tl.sum(tl.exp(x - safe), 0))
    key = tl.where(word < words, _ordered(x, word), -0x7FFFFFFFFFFFFFFF)
    best = tl.max(tl.reshape(key, (TILE // GROUP, GROUP)), 1)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(keys + row * groups + group, best)


@triton.jit
def _best_groups(keys, best, groups, k, SIZE: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SIZE)
    key = tl.load(keys + row * groups + slot, mask=slot < groups, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(best + row * K + tl.arange(0, K), tl.topk(key, K))


@triton.jit
def _best_words(
    logits, best, tops, totals, ids, logps, words, tiles, k, stride,
    SIZE: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILES)
    top = tl.load(tops + row * tiles + part, mask=part < tiles, other=float("-inf"))
    total = tl.load(totals + row * tiles + part, mask=part < tiles, other=0.0)
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    slot = tl.arange(0, SIZE)
    group_key = tl.load(best + row * K + slot // GROUP)
    member = 0x7FFFFFFF - (group_key & 0xFFFFFFFF).to(tl.int32)
    word = (member // GROUP) * GROUP + slot % GROUP
    inside = (group_key != -0x7FFFFFFFFFFFFFFF) & (word < words)
    x = tl.load(logits + row * stride + word, mask=inside, other=float("-inf")).to(tl.float32)
    key = tl.topk(tl.where(inside, _ordered(x, word), -0x7FFFFFFFFFFFFFFF), K)
    out = tl.arange(0, K)
    order = (key >> 32).to(tl.int32)
    value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(ids + row * k + out, (0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)).to(tl.int64), mask=out < k)
    tl.store(logps + row * k + out, value - lse, mask=out < k)


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: (ids int64 `[B, k]`, log-probs fp32 `[B, k]`); logits bf16 or fp32 with unit stride in a
    row, k <= V."""
    rows, words = logits.shape
    device = logits.device
    size = max(16, triton.next_power_of_2(k))
    tiles = triton.cdiv(words, TILE)
    groups = tiles * (TILE // GROUP)
    keys = torch.empty(rows, groups, dtype=torch.int64, device=device)
    tops, totals = (torch.empty(rows, tiles, dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty(rows, size, dtype=torch.int64, device=device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    logps = torch.empty(rows, k, dtype=torch.float32, device=device)
    if rows:
        _groups[(rows, tiles)](
            logits, keys, tops, totals, words, tiles, groups, logits.stride(0), TILE=TILE, GROUP=GROUP, num_warps=8
        )
        _best_groups[(rows,)](
            keys, best, groups, k, SIZE=max(triton.next_power_of_2(groups), size), K=size, num_warps=8
        )
        _best_words[(rows,)](
            logits, best, tops, totals, ids, logps, words, tiles, k, logits.stride(0),
            SIZE=size * GROUP, K=size, GROUP=GROUP, TILES=triton.next_power_of_2(tiles), num_warps=16,
        )  # fmt: skip
    return ids, logps
