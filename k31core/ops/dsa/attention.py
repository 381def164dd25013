"""Multi-head latent attention over all or over selected keys, in plain torch: the definition, and the CPU path.

Legend: Tq queries, Tk packed keys, H heads, dq query/key width (128 + 64), dv value width, B decoding rows, S cache
slots, L latent width (512), R extra key width (64, not rotated). Softmax in fp32 (fp64 for fp64 input), outputs in
the dtype of v.
"""

import torch

from k31core.ops.dsa.reference import BLOCK, causal_ranges, length_buckets
from k31core.ops.rowstable import accumulate_dtype


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
    `select_keys`). cu_seqlens: int `[n + 1]` over the keys. scale: on the scores. rows: int `[Tq]`, the packed
    positions of the queries when they are not all the tokens. Differentiable in q, k and v.
    """
    if rows is not None:
        key_start, key_end = causal_ranges(cu_seqlens, rows)
        position = torch.arange(k.shape[0], device=k.device)
        visible = (position >= key_start[:, None]) & (position < key_end[:, None])
        if indices is not None:
            visible = visible & _selected(indices, k.shape[0])
        return _attend(q[None], k[None], v[None], visible[None], scale)[0]
    output = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=v.dtype, device=v.device)
    for size, packed, valid in length_buckets(cu_seqlens):
        packed, valid = packed.to(q.device), valid.to(q.device)
        visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril() & valid[:, None, :]
        if indices is not None:
            relative = torch.where(indices[packed] >= 0, indices[packed] - packed[:, :1, None], -1)
            visible = visible & _selected(relative, size)
        attended = _attend(q[packed], k[packed], v[packed], visible, scale)
        output = output.index_put((packed[valid],), attended[valid])
    return output


def _selected(indices: torch.Tensor, keys: torch.Tensor | int) -> torch.Tensor:
    """bool `[.., keys]`: which keys are named in the last dimension of `indices`; -1 names none."""
    slots = torch.where(indices >= 0, indices, keys).to(torch.int64)
    mask = torch.zeros(*indices.shape[:-1], int(keys) + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(-1, slots, True)[..., :-1]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """Masked attention of one padded batch, `[m, Tq, H, dv]`. q `[m, Tq, H, dq]`, k, v alike, visible bool `[m, Tq,
    Tk]`."""
    dtype = accumulate_dtype(v)
    query, key, value = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    scores = (query @ key.transpose(-1, -2)) * scale
    # a padding query sees nothing; let it see everything rather than make NaN in its softmax and in the gradient
    open_rows = visible | ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~open_rows[:, None], float("-inf")), dim=-1)
    return (weights @ value).transpose(1, 2).to(v.dtype)


def mla_latent_attention(
    q_latent: torch.Tensor,
    q_extra: torch.Tensor,
    latent: torch.Tensor,
    extra: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decoding in the absorbed form: one query a row against its latent cache, `[B, H, L]` in the dtype of q_latent.

    q_latent: `[B, H, L]`, the query already multiplied by the key half of kv_b. q_extra: `[B, H, R]`. latent: `[B,
    S, L]`. extra: `[B, S, R]`. lengths: int `[B]`, cache slots in use, at least 1. indices: int `[B, topk]` slots to
    attend, -1 = none. The keys are reduced in blocks of `BLOCK` added in order, so a row has the same bits in any
    batch (tested on CPU), and the same bits whether `indices` is None or names all its slots in order.
    """
    dtype = accumulate_dtype(q_latent)
    rows, slots, width = latent.shape
    if indices is None:
        used = torch.arange(slots, device=latent.device)[None] < lengths[:, None]
    else:
        used = (indices >= 0) & (indices < lengths[:, None])
        at = indices.clamp(min=0).to(torch.int64)[..., None]
        latent = torch.gather(latent, 1, at.expand(-1, -1, width))
        extra = torch.gather(extra, 1, at.expand(-1, -1, extra.shape[2]))
    keys = torch.cat([latent, extra], dim=-1).to(dtype).masked_fill(~used[..., None], 0.0)
    padding = -keys.shape[1] % BLOCK
    heads, blocks = q_latent.shape[1], -(-keys.shape[1] // BLOCK)
    padding = blocks * BLOCK - keys.shape[1]
    keys = torch.nn.functional.pad(keys, (0, 0, 0, padding)).view(rows * blocks, BLOCK, -1)
    used = torch.nn.functional.pad(used, (0, padding)).view(rows, blocks, 1, BLOCK)
    query = torch.cat([q_latent, q_extra], dim=-1).to(dtype)[:, None].expand(-1, blocks, -1, -1)
    query = query.reshape(rows * blocks, heads, -1)
    # one product of a fixed shape for each row and block: the same bits whatever else is in the batch
    scores = torch.bmm(query, keys.transpose(1, 2)).view(rows, blocks, heads, BLOCK) * scale
    scores = scores.masked_fill(~used, float("-inf"))
    weights = (scores - scores.amax(dim=(1, 3), keepdim=True)).exp()
    sums = weights.sum(-1, keepdim=True)
    parts = torch.bmm(weights.view(rows * blocks, heads, BLOCK), keys[..., :width]).view(rows, blocks, heads, width)
    total, out = sums[:, 0], parts[:, 0]
    for block in range(1, blocks):
        total = total + sums[:, block]
        out = out + parts[:, block]
    return (out / total).to(q_latent.dtype)
