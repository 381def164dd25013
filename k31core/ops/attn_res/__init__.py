"""AttnRes: mix the residual snapshot bank with the running sum."""

from collections.abc import Sequence

import torch

from k31core.ops.attn_res import reference
from k31core.ops.dispatch import kernel_usable

__all__ = ["attn_res_mix"]


def attn_res_mix(
    bank: torch.Tensor | Sequence[torch.Tensor],
    prefix: torch.Tensor,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Softmax-weighted sum of the snapshots and the running sum, `[T, D]` in the dtype of `prefix`.

    bank: n snapshots `[T, D]` (a list spares a copy, or one `[n, T, D]` tensor; n may be 0). prefix: `[T, D]`.
    norm_weight: `[D]`. proj_weight: `[1, D]`. On a GPU the kernel gives no gradient to the two weights; where one is
    required the reference runs.
    """
    trained = torch.is_grad_enabled() and (norm_weight.requires_grad or proj_weight.requires_grad)
    mixed = any(row.dtype != prefix.dtype for row in bank)
    problem = "a weight requires a gradient" if trained else "the rows have several dtypes" if mixed else None
    if kernel_usable("attn_res_mix", prefix, dtypes=(torch.bfloat16, torch.float32), problem=problem):
        from k31core.ops.attn_res import kernel

        return kernel.attn_res_mix(list(bank), prefix, norm_weight, proj_weight, eps)
    return reference.attn_res_mix(bank, prefix, norm_weight, proj_weight, eps)
