"""Latent attention and index scores over a cache of fixed blocks, for decoding and for prefill alike.

Every matrix product has a shape that depends on one row's (or one prompt's) own blocks only, and blocks are added in
order, so a query has the same bits whatever the longest row of its batch is and however its prompt was cut into
pieces.

Legend: G cache rows (decoding requests, or one prompt), b blocks of BLOCK slots, Q queries a cache row, H heads, L
latent width, W = L + R cached width, Hi index heads, di index width.
"""

import torch
from torch import Tensor

from k31core.ops.rowstable import accumulate_dtype

BLOCK = 64
"""Cache slots reduced together: one page of the cache."""
_LAST = -(1 << 63)
"""Below the rank of every visible slot."""


def latent_attention(query: Tensor, keys: Tensor, visible: Tensor, *, latent: int, scale: float) -> Tensor:
    """Absorbed multi-head latent attention, `[G, Q, H, L]` in the dtype of the query; softmax in fp32 (fp64 for fp64).

    query: `[G, Q, H, W]`, the nope part already multiplied by the key half of kv_b. keys: `[G, b, BLOCK, W]`, finite
    everywhere. visible: bool `[G, Q, b * BLOCK]`, at least one slot a query. latent: L, the leading part of a key
    that is also its value.
    """
    dtype = accumulate_dtype(query)
    rows, queries, heads, width = query.shape
    blocks = keys.shape[1]
    keys = keys.to(dtype)
    flat = query.to(dtype).reshape(rows, 1, queries * heads, width)
    scores = (flat @ keys.transpose(-1, -2)) * scale  # [G, b, Q * H, BLOCK]
    mask = visible.view(rows, queries, blocks, BLOCK).transpose(1, 2)[:, :, :, None]  # [G, b, Q, 1, BLOCK]
    scores = scores.view(rows, blocks, queries, heads, BLOCK).masked_fill(~mask, float("-inf"))
    weights = (scores - scores.amax(dim=(1, 4), keepdim=True)).exp()
    sums = weights.sum(-1, keepdim=True)
    outs = weights.view(rows, blocks, queries * heads, BLOCK) @ keys[..., :latent]
    total, out = sums[:, 0], outs[:, 0].view(rows, queries, heads, latent)
    for block in range(1, blocks):
        total = total + sums[:, block]
        out = out + outs[:, block].view(rows, queries, heads, latent)
    return (out / total).to(query.dtype)


def causal_mask(ends: Tensor, slots: int) -> Tensor:
    """bool `[G, Q, slots]`: slots before `ends` `[G, Q]`, the number of tokens a query sees."""
    return torch.arange(slots, device=ends.device) < ends[..., None]


def selected_mask(index_q: Tensor, index_w: Tensor, index_keys: Tensor, ends: Tensor, topk: int) -> Tensor:
    """bool `[G, Q, b * BLOCK]`: the `topk` slots with the best index scores among those before `ends` `[G, Q]`.

    index_q: `[G, Q, Hi, di]`. index_w: `[G, Q, Hi]`. index_keys: `[G, b, BLOCK, di]`. All slots before `ends` while
    there are at most `topk`; equal scores: the larger slot wins.
    """
    rows, queries, heads, width = index_q.shape
    slots = index_keys.shape[1] * BLOCK
    flat = index_q.to(torch.float32).reshape(rows, 1, queries * heads, width)
    products = torch.relu_(index_keys.to(torch.float32) @ flat.transpose(-1, -2))  # [G, b, BLOCK, Q * Hi]
    weights = index_w.to(torch.float32) * (width**-0.5 * heads**-0.5)
    scores = (products.view(rows, slots, queries, heads) * weights[:, None]).sum(-1)
    ranked = _ranks(scores.transpose(1, 2).reshape(rows * queries, slots))
    visible = torch.arange(slots, device=index_q.device) < ends.reshape(-1, 1)
    best = torch.topk(ranked.masked_fill(~visible, _LAST), min(topk, slots), sorted=False).indices
    mask = torch.zeros_like(visible).scatter_(1, best, True)
    return mask.logical_and_(visible).view(rows, queries, slots)


def _ranks(scores: Tensor) -> Tensor:
    """int64, all different in a row: ordered like the fp32 scores, and like the slots where scores are equal."""
    bits = (scores + 0.0).view(torch.int32)  # adding turns -0.0 into 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats fall as their bits rise
    return (ordered.to(torch.int64) << 32) | torch.arange(scores.shape[1], device=scores.device)
