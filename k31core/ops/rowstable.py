"""Elementwise functions whose result for one element never depends on its neighbours.

On CPU, `torch.sigmoid` and `silu` compute the last few elements of a tensor with scalar code that rounds differently
from the vector code before them, so one value can change with the number of rows in the batch. Exact resume of a
rollout needs results that do not depend on who else is in the batch: every op that uses a sigmoid takes it from here.
"""

import torch

VECTOR_MULTIPLE = 64
"""Elements; a multiple of what one unrolled vector step handles for every CPU width and dtype torch has."""


def accumulate_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype statistics are computed in: fp64 stays fp64 (gradient checks), everything else is fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`torch.sigmoid(x)`, the same bits for an element in any tensor size on CPU. Any shape, floating dtype;
    autograd works."""
    count = x.numel()
    if x.device.type != "cpu" or (count % VECTOR_MULTIPLE == 0 and x.is_contiguous()):
        return torch.sigmoid(x)
    padding = -count % VECTOR_MULTIPLE
    flat = torch.nn.functional.pad(x.reshape(-1), (0, padding))
    return torch.sigmoid(flat)[:count].view(x.shape)


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`, the same bits for an element in any tensor size on CPU."""
    return x * sigmoid(x)
