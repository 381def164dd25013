"""Attention over selected rows of the latent itself (the absorbed, MQA form), in plain torch: the definition, and
the CPU path.

Legend: Tq queries, Tk packed keys, H heads, L latent width (512), R extra key width (64). With kv_b's key half
absorbed into the query, every head reads the same row of L + R numbers as its key and the first L of them as its
value: a gathered row is shared by the heads, which is what makes attention over 2048 scattered keys affordable.
"""

import torch

from k31core.ops.rowstable import accumulate_dtype


def sparse_latent_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, *, scale: float, value_width: int, chunk: int = 64
) -> torch.Tensor:
    """`[Tq, H, L]` in the dtype of q: each query over the rows of kv its `indices` name; a row of -1s gives zeros.

    q: `[Tq, H, L + R]`. kv: `[Tk, L + R]`. indices: int `[Tq, topk]`, -1 = none, no index twice. value_width: L.
    `chunk` queries are gathered at a time: `[chunk, topk, L + R]`. Differentiable in q and kv.
    """
    dtype = accumulate_dtype(q)
    parts = []
    for begin in range(0, q.shape[0], chunk):
        chosen = indices[begin : begin + chunk].to(torch.int64)
        seen = (chosen >= 0)[:, None]
        rows = kv[chosen.clamp(min=0)].to(dtype)
        scores = (q[begin : begin + chunk].to(dtype) @ rows.transpose(1, 2)) * scale
        weights = torch.softmax(scores.masked_fill(~seen, torch.finfo(dtype).min), dim=-1).masked_fill(~seen, 0.0)
        parts.append((weights @ rows[..., :value_width]).to(q.dtype))
    return torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], value_width)


def absorb_query(q: torch.Tensor, key_half: torch.Tensor) -> torch.Tensor:
    """`[Tq, H, nope + R]` -> `[Tq, H, L + R]`: the nope part times kv_b's key half `[H, nope, L]`, the extra part as
    it is."""
    nope = key_half.shape[1]
    latent = torch.einsum("qhn,hnl->qhl", q[..., :nope], key_half)
    return torch.cat([latent, q[..., nope:]], dim=-1)


def expand_value(attended: torch.Tensor, value_half: torch.Tensor) -> torch.Tensor:
    """`[Tq, H, L]` -> `[Tq, H, dv]`: the attended latent times kv_b's value half `[H, dv, L]`."""
    return torch.einsum("qhl,hvl->qhv", attended, value_half)
