"""Kimi delta attention in chunks (WY form) in torch: the CPU training path, equal to `kda_recurrent` in value and
gradient.

With G_i = g_1 + .. + g_i inside a chunk, S_0 its first state and u_i = beta_i (v_i - k_i^T diag(exp(g_i)) S_{i-1}):

    S_i = diag(exp(G_i)) S_0 + sum_{j <= i} diag(exp(G_i - G_j)) k_j u_j^T
    (I + L) U = beta (V - (K exp(G)) S_0),   L_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd) for j < i
    o_i = (q_i exp(G_i))^T S_0 + sum_{j <= i} (sum_d q_id k_jd exp(G_id - G_jd)) u_j

The usual split exp(G_i - G_j) = exp(G_i) exp(-G_j) overflows fp32 after 17 tokens, since g may reach -5 a token and
channel. Here G is taken relative to the middle of a chunk of 16 tokens, so no factor exceeds exp(40) and no product,
masked ones included, exp(80); each factor has full relative precision, so the product has too. A decay below
`SPLIT_FLOOR` a token takes the slow form, which exponentiates only differences <= 0.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from k31core.ops.rowstable import accumulate_dtype

CHUNK = 16
"""Tokens; every sequence is padded to a multiple. Fixed, so that a sequence's result does not depend on its
neighbours."""


SPLIT_FLOOR = -5.2
"""Log decay a token and channel; 16 of them must stay inside the exponent range of fp32, exp(88)."""


class ChunkLayout(NamedTuple):
    """Where each packed token goes: chunks of all sequences in order, each sequence starting a new chunk."""

    slots: torch.Tensor
    """int64 `[T]`: row of the token in the padded layout `[chunks * CHUNK]`."""
    first: list[int]
    """The first chunk of each sequence."""
    count: list[int]
    """The number of chunks of each sequence, 0 for an empty one."""


def chunk_layout(cu_seqlens: torch.Tensor, device: torch.device) -> ChunkLayout:
    """Chunks of `CHUNK` tokens for sequences bounded by `cu_seqlens` (int `[n + 1]`)."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    count = [-(-length // CHUNK) for length in lengths]
    first, total = [], 0
    for chunks in count:
        first.append(total)
        total += chunks
    shift = torch.tensor([f * CHUNK - start for f, start in zip(first, bounds)], dtype=torch.int64)
    slots = torch.arange(bounds[-1]) + torch.repeat_interleave(shift, torch.tensor(lengths, dtype=torch.int64))
    return ChunkLayout(slots.to(device), first, count)


def _to_chunks(x: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    """`[T, H, ..]` -> `[chunks, H, CHUNK, ..]`, zeros where a sequence's last chunk is not full."""
    chunks = sum(layout.count)
    padded = x.new_zeros(chunks * CHUNK, *x.shape[1:]).index_copy(0, layout.slots, x)
    return padded.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2)


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o `[T, H, V]` in the dtype of v, final state `[n, H, K, V]` fp32) for packed sequences; q is scaled by K **
    -0.5 inside.

    q, k: `[T, H, K]`, already L2-normalised. v: `[T, H, V]`. g: `[T, H, K]` fp32 log decay, <= 0. beta: `[T, H]`.
    cu_seqlens: int `[n + 1]`. initial_state: `[n, H, K, V]`, zeros when None.
    """
    tokens, heads, width = q.shape
    sequences, values = len(cu_seqlens) - 1, v.shape[2]
    dtype = accumulate_dtype(v)
    state = (
        torch.zeros(sequences, heads, width, values, dtype=dtype, device=v.device)
        if initial_state is None
        else initial_state.to(dtype)
    )
    if tokens == 0:
        return v.new_zeros(v.shape), state
    layout = chunk_layout(cu_seqlens, v.device)
    query = _to_chunks(q.to(dtype) * width**-0.5, layout)
    key, value, decay = (_to_chunks(x.to(dtype), layout) for x in (k, v, g))
    rate = _to_chunks(beta.to(dtype), layout)[..., None]

    cumulative = decay.cumsum(-2)
    scores_qk, system = _inside_chunk(query, key, cumulative, rate, split=float(g.detach().amin()) >= SPLIT_FLOOR)
    entering = cumulative.exp()
    right = torch.cat([rate * value, rate * (key * entering)], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, through = solved.split([values, width], dim=-1)
    to_end = (cumulative[..., -1:, :] - cumulative).exp() * key
    end_decay = entering[..., -1, :, None]

    queries = query * entering
    outputs = torch.zeros_like(value)
    for c in range(max(layout.count)):
        active = [s for s in range(sequences) if layout.count[s] > c]
        chunk = torch.tensor([layout.first[s] + c for s in active], device=v.device)
        row = torch.tensor(active, device=v.device)
        before = state[row]
        update = own[chunk] - through[chunk] @ before
        out = queries[chunk] @ before + scores_qk[chunk] @ update
        outputs = outputs.index_copy(0, chunk, out)
        state = state.index_copy(0, row, end_decay[chunk] * before + to_end[chunk].transpose(-1, -2) @ update)
    flat = outputs.transpose(1, 2).reshape(-1, heads, values)
    return flat[layout.slots].to(v.dtype), state


def _inside_chunk(
    query: torch.Tensor, key: torch.Tensor, cumulative: torch.Tensor, rate: torch.Tensor, split: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decayed q k^T for j <= i, the unit lower triangular I + L), both `[chunks, H, CHUNK, CHUNK]`."""
    both = torch.stack([query, key])
    if split:
        relative = cumulative - cumulative[..., CHUNK // 2 - 1 : CHUNK // 2, :]
        pair = (both * relative.exp()) @ (key * (-relative).exp()).transpose(-1, -2)
    else:
        causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
        difference = cumulative[..., :, None, :] - cumulative[..., None, :, :]
        decayed = difference.masked_fill(~causal[:, :, None], float("-inf")).exp() * key[..., None, :, :]
        pair = (decayed @ both[..., None])[..., 0]
    identity = torch.eye(CHUNK, dtype=key.dtype, device=key.device)
    return pair[0].tril(), identity + (rate * pair[1]).tril(-1)
