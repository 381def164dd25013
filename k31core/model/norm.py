"""RMSNorm with fp32 statistics, and the frozen LayerNorm of the indexer's keys."""

import torch
from torch import Tensor, nn

from k31core.ops.rowstable import accumulate_dtype
from k31core.parallel.sharding import Shard, Stored


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; statistics in fp32, result in the dtype of x."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)
        self.shards = {"weight": Shard((width,), Stored.SMALL)}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulate_dtype(x))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.to(wide.dtype)).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; statistics in fp32."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype, device=device), requires_grad=False)
        self.shards = {"weight": Shard((width,), Stored.SMALL), "bias": Shard((width,), Stored.SMALL)}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulate_dtype(x))
        centred = wide - wide.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.to(wide.dtype) + self.bias.to(wide.dtype)).to(x.dtype)
