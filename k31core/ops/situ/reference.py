"""SiTU-GLU in plain torch: the definition, and the CPU path."""

import torch

from k31core.ops.rowstable import accumulate_dtype, sigmoid


def situ_glu(gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float) -> torch.Tensor:
    """beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta) for a = gate, b = up; same shape, input dtype.

    Computed in fp32 (fp64 for fp64 input) whatever the input dtype; the K3 family uses beta 4 and linear beta 25.
    """
    dtype = accumulate_dtype(gate)
    a, b = gate.to(dtype), up.to(dtype)
    activated = beta * torch.tanh(a / beta) * sigmoid(a)
    linear = linear_beta * torch.tanh(b / linear_beta)
    return (activated * linear).to(gate.dtype)
