"""Kimi delta attention on packed sequences: gate, chunked form, decoding step. CPU: torch; GPU: fla-core and one
kernel of ours."""

import torch

from k31core.ops.dispatch import kernel_usable
from k31core.ops.kda import chunk, reference
from k31core.ops.kda.reference import kda_gate, kda_recurrent, l2norm
from k31core.ops.rowstable import accumulate_dtype, sigmoid

__all__ = ["kda_chunk", "kda_gate", "kda_gated", "kda_recurrent", "kda_step", "l2norm"]

SAFE_LOWER_BOUND = -5.0
"""Log decay a token; fla's tensor-core form is safe down to here."""


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    bounded_gate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o `[T, H, V]` in the dtype of v, final state `[n, H, K, V]` fp32) for packed sequences; q is scaled by K **
    -0.5 inside.

    q, k: `[T, H, K]`, already L2-normalised. v: `[T, H, V]`. g: `[T, H, K]` fp32 log decay, <= 0. beta: `[T, H]`.
    cu_seqlens: int `[n + 1]`. initial_state: `[n, H, K, V]`, zeros when None. bounded_gate: g is at least -5
    everywhere, as `kda_gate` makes it for the K3 family (the GPU kernels trust it; the CPU form looks for itself).
    """
    if q.device.type == "cuda":
        from k31core.ops.kda import kernel_fla

        if kernel_usable("kda_chunk", v, dtypes=(torch.bfloat16, torch.float16), problem=kernel_fla.why_unavailable()):
            return kernel_fla.kda_chunk(q, k, v, g, beta, cu_seqlens, initial_state, bounded_gate)
    return chunk.kda_chunk(q, k, v, g, beta, cu_seqlens, initial_state)


def kda_gated(  # noqa: PLR0913 - the raw projections of one layer
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta_logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda_chunk` from raw projections: L2 norm of q and k, gate of f, sigmoid of beta; on a GPU inside fla's kernels.

    q, k, f: `[T, H, K]`. v: `[T, H, V]`. beta_logits: `[T, H]`. A_log: `[H]`. dt_bias: `[H * K]`. lower_bound: of
    the gate.
    """
    if q.device.type == "cuda":
        from k31core.ops.kda import kernel_fla

        problem = kernel_fla.why_unavailable()
        if lower_bound < SAFE_LOWER_BOUND:
            problem = f"the gate's lower bound {lower_bound} is below {SAFE_LOWER_BOUND}"
        if kernel_usable("kda_gated", v, dtypes=(torch.bfloat16, torch.float16), problem=problem):
            return kernel_fla.kda_gated(q, k, v, f, beta_logits, A_log, dt_bias, lower_bound, cu_seqlens, initial_state)
    g = kda_gate(f, A_log, dt_bias, lower_bound)
    beta = sigmoid(beta_logits.to(accumulate_dtype(beta_logits)))
    return chunk.kda_chunk(l2norm(q), l2norm(k), v, g, beta, cu_seqlens, initial_state)


def kda_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row: (o `[B, H, V]` in the dtype of v, new state `[B, H, K, V]` fp32), the same bits for
    any B.

    q, k, g: `[B, H, K]` (q and k L2-normalised); v: `[B, H, V]`; beta: `[B, H]`; state: `[B, H, K, V]`. q is scaled
    inside.
    """
    width = q.shape[2]
    problem = None if width & (width - 1) == 0 else f"the key width {width} is not a power of two"
    if state.dtype != torch.float32:
        problem = f"the state is {state.dtype}, not fp32"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, state)):
        problem = "a gradient is wanted"
    if kernel_usable("kda_step", v, dtypes=(torch.bfloat16, torch.float32), problem=problem):
        from k31core.ops.kda import kernel

        return kernel.kda_step(q, k, v, g, beta, state)
    return reference.kda_step(q, k, v, g, beta, state)
