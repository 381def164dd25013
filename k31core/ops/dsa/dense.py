"""Causal attention over all keys of each packed sequence on a GPU, by torch's fused attention, one call a sequence."""

from itertools import pairwise

import torch


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """`[T, H, dv]`. q, k: `[T, H, dq]`, v: `[T, H, dv]`, bf16. One host sync for the bounds.

    The value is padded to the key's width: torch's flash kernel takes one width only, and its other kernels are slower.
    """
    width = v.shape[2]
    value = torch.nn.functional.pad(v, (0, q.shape[2] - width)) if q.shape[2] > width else v
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        query, key, val = (x[start:end].transpose(0, 1)[None] for x in (q, k, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, val, is_causal=True, scale=scale)
        parts.append(out[0].transpose(0, 1)[..., :width])
    return torch.cat(parts)
