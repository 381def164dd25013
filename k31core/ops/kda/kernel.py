"""The KDA decoding step on a GPU: each state is read once and written once.

One program handles `COLUMNS` value columns of one row and head, so a row's result does not depend on the batch.
"""

import torch
import triton
import triton.language as tl

COLUMNS = 32


@triton.jit
def _step(
    q, k, v, g, beta, state, out, new_state, scale,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # of the flattened [B, H]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = tl.arange(0, K)
    at = head * (K * V) + width[:, None] * V + column[None, :]
    inside = column < V
    decay = tl.exp(tl.load(g + head * K + width).to(tl.float32))
    key = tl.load(k + head * K + width).to(tl.float32)
    query = tl.load(q + head * K + width).to(tl.float32) * scale
    value = tl.load(v + head * V + column, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(beta + head).to(tl.float32)
    decayed = tl.load(state + at, mask=inside[None, :], other=0.0) * decay[:, None]
    error = value - tl.sum(decayed * key[:, None], 0)
    updated = decayed + key[:, None] * (rate * error)[None, :]
    tl.store(new_state + at, updated, mask=inside[None, :])
    tl.store(out + head * V + column, tl.sum(updated * query[:, None], 0).to(out.dtype.element_ty), mask=inside)


def kda_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, without a gradient; fp32 state, K a power of two."""
    rows, heads, width = q.shape
    values = v.shape[2]
    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    out, new_state = torch.empty_like(v), torch.empty_like(state)
    if rows:
        _step[(rows * heads, triton.cdiv(values, COLUMNS))](
            q, k, v, g, beta, state, out, new_state, width**-0.5,
            K=width, V=values, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out, new_state
