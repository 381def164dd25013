"""DSA: index scores, deterministic selection of the best keys, and attention over them.

Training below `topk` keys (or without an indexer) attends densely: `sparse_mla_attention(.., indices=None)`. Above
it, a GPU should attend the latent rows: `absorb_query`, `sparse_latent_attention`, `expand_value`; the plain form
with `indices` is the CPU path and would hold a T x T mask.
"""

import torch

from k31core.ops.dispatch import kernel_usable
from k31core.ops.dsa import attention, latent, reference
from k31core.ops.dsa.attention import mla_latent_attention
from k31core.ops.dsa.latent import absorb_query, expand_value
from k31core.ops.dsa.reference import causal_ranges, index_scores, index_scores_step, select_topk

__all__ = [
    "absorb_query",
    "causal_ranges",
    "expand_value",
    "index_scores",
    "index_scores_step",
    "mla_latent_attention",
    "select_keys",
    "select_topk",
    "sparse_latent_attention",
    "sparse_mla_attention",
]


def _power_of_two(width: int) -> bool:
    return width >= 16 and width & (width - 1) == 0


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
    """Index scores and selection for packed sequences: int32 `[Tq, topk]` rows of the packed keys, ascending, then -1.

    q: `[Tq, Hi, d]`. k: `[Tk, d]`. w: `[Tq, Hi]`. cu_seqlens: int `[n + 1]` over the keys. rows: int `[Tq]`, the
    packed positions of the queries when they are not all the tokens. Each query gets its `topk` best causal keys,
    all of them while there are fewer; among equal scores the larger key index wins. No gradient.
    """
    width = q.shape[2]
    problem = None if _power_of_two(width) else f"the index width {width} is not a power of two of at least 16"
    if k.dtype != q.dtype:
        problem = f"q is {q.dtype} and k is {k.dtype}"
    if kernel_usable("select_keys", q, dtypes=(torch.bfloat16,), problem=problem):
        from k31core.ops.dsa import kernel_select

        return kernel_select.select_keys(q, k, w, cu_seqlens=cu_seqlens, topk=topk, rows=rows)
    return reference.select_keys(q, k, w, cu_seqlens=cu_seqlens, topk=topk, rows=rows)


def sparse_latent_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, *, scale: float, value_width: int
) -> torch.Tensor:
    """`[Tq, H, L]`: each query over the latent rows its `indices` name (absorbed form); a row of -1s gives zeros.

    q: `[Tq, H, L + R]` from `absorb_query`. kv: `[Tk, L + R]`. indices: int `[Tq, topk]`, -1 = none. value_width: L.
    Differentiable in q and kv; on a GPU the last bits of the gradient of kv depend on the order of atomic additions.
    """
    extra = q.shape[2] - value_width
    problem = None
    if not (_power_of_two(value_width) and _power_of_two(extra)):
        problem = f"the widths {value_width} and {extra} are not powers of two of at least 16"
    if kv.dtype != q.dtype:
        problem = f"q is {q.dtype} and kv is {kv.dtype}"
    if kernel_usable("sparse_latent_attention", q, dtypes=(torch.bfloat16,), problem=problem):
        from k31core.ops.dsa import kernel_attention

        return kernel_attention.sparse_latent_attention(q, kv, indices, scale=scale, value_width=value_width)
    return latent.sparse_latent_attention(q, kv, indices, scale=scale, value_width=value_width)


def sparse_mla_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    scale: float,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each packed sequence, `[Tq, H, dv]`; over the keys named in `indices` where it is given.

    q: `[Tq, H, dq]`. k: `[Tk, H, dq]`. v: `[Tk, H, dv]`. indices: int `[Tq, topk]` rows of k, -1 = none (from
    `select_keys`). cu_seqlens: int `[n + 1]` over the keys. rows: int `[Tq]`, the packed positions of the queries
    when they are not all the tokens.
    """
    problem = None
    if indices is not None:
        problem = "indices are given (sparse_latent_attention is the fast form)"
    elif rows is not None:
        problem = "the queries are a part of the sequence (context parallelism)"
    if kernel_usable("sparse_mla_attention", q, dtypes=(torch.bfloat16, torch.float16), problem=problem):
        from k31core.ops.dsa.dense import dense_attention

        return dense_attention(q, k, v, cu_seqlens=cu_seqlens, scale=scale)
    return attention.sparse_mla_attention(q, k, v, indices, cu_seqlens=cu_seqlens, scale=scale, rows=rows)
