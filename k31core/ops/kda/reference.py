"""Kimi delta attention in plain torch: the token loop that defines it, the decoding step, and the gate.

Legend: T packed tokens, n sequences, H heads, K key width, V value width, B decoding rows. Everything is computed in
fp32 (fp64 for fp64 input); outputs come back in the dtype of v, states stay fp32 (fp64). q is scaled by K ** -0.5
inside every operator.

For each sequence and head, with the state S `[K, V]`:
    S <- diag(exp(g)) S;  S <- S + beta k (v - S^T k)^T;  o = S^T (q K ** -0.5)
which is S <- (I - beta k k^T) diag(exp(g)) S + beta k v^T: decay first, then the delta update.
"""

from itertools import pairwise

import torch

from k31core.ops.rowstable import accumulate_dtype, sigmoid


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x ** 2) + eps) over the last dimension; fp32 statistics, result in the dtype of x."""
    rows = x.to(accumulate_dtype(x))
    return (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def kda_gate(f: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """Log decay g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias)), fp32 (fp64 for fp64 f), `[.., H, K]`.

    f: `[.., H, K]`. A_log: `[H]`. dt_bias: `[H * K]`. lower_bound: negative, -5 in the K3 family, so exp(g) is in (e
    ** -5, 1).
    """
    heads, width = f.shape[-2:]
    dtype = accumulate_dtype(f)
    rate = A_log.to(dtype).exp()[:, None]
    return lower_bound * sigmoid(rate * (f.to(dtype) + dt_bias.to(dtype).view(heads, width)))


def kda_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row: (o `[B, H, V]` in the dtype of v, new state `[B, H, K, V]`).

    q, k, g: `[B, H, K]`; v: `[B, H, V]`; beta: `[B, H]`; state: `[B, H, K, V]`. The sums run over the same dimension
    of the same extent for every row, so a row has the same bits for any B (tested on CPU).
    """
    dtype = accumulate_dtype(v)
    query, key, value = (x.to(dtype) for x in (q, k, v))
    decayed = state.to(dtype) * g.to(dtype).exp()[..., None]
    error = value - (decayed * key[..., None]).sum(-2)
    new_state = decayed + key[..., None] * (beta.to(dtype)[..., None] * error)[..., None, :]
    scaled = query * q.shape[-1] ** -0.5
    return (new_state * scaled[..., None]).sum(-2).to(v.dtype), new_state


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token: (o `[T, H, V]`, final state `[n, H, K, V]`). Arguments as in `kda_chunk`."""
    bounds = cu_seqlens.tolist()
    dtype = accumulate_dtype(v)
    outputs, states = [], []
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        if initial_state is None:
            state = torch.zeros(1, q.shape[1], q.shape[2], v.shape[2], dtype=dtype, device=v.device)
        else:
            state = initial_state[sequence : sequence + 1].to(dtype)
        for t in range(start, end):
            at = slice(t, t + 1)
            o, state = kda_step(q[at], k[at], v[at], g[at], beta[at], state)
            outputs.append(o)
        states.append(state)
    o = torch.cat(outputs) if outputs else v.new_zeros(v.shape)
    return o, torch.cat(states)
