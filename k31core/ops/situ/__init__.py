"""SiTU-GLU: the activation of every feed-forward layer of the K3 family."""

import torch

from k31core.ops.dispatch import kernel_usable
from k31core.ops.situ import reference

__all__ = ["situ_glu"]


def situ_glu(gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float) -> torch.Tensor:
    """beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta), a = gate, b = up; fp32 inside, input dtype
    out."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"situ_glu: gate is {gate.dtype}{list(gate.shape)}, up is {up.dtype}{list(up.shape)}; they must match"
        )
    if kernel_usable("situ_glu", gate, dtypes=(torch.bfloat16, torch.float32)):
        from k31core.ops.situ import kernel

        return kernel.situ_glu(gate, up, beta, linear_beta)
    return reference.situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
