"""AttnRes: a learned mix of residual snapshots replaces the plain residual at the entrance of every sublayer.

Legend: T tokens, D hidden, n snapshots taken so far (one every `attn_res_block_size` layers).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from k31core.model.build import Build
from k31core.model.norm import RmsNorm
from k31core.ops.attn_res import attn_res_mix
from k31core.parallel.sharding import Shard, Stored


class Residual(NamedTuple):
    """What flows from layer to layer, and across pipeline stages."""

    bank: Tensor
    """`[n, T, D]` snapshots."""
    prefix: Tensor
    """`[T, D]` running sum."""

    def pack(self) -> Tensor:
        """One tensor `[n + 1, T, D]` for the next pipeline stage."""
        return torch.cat([self.bank, self.prefix[None]])

    @staticmethod
    def unpack(packed: Tensor) -> "Residual":
        """Inverse of `pack`."""
        return Residual(packed[:-1], packed[-1])

    def snapshot(self) -> "Residual":
        """The bank with the running sum appended."""
        return Residual(torch.cat([self.bank, self.prefix[None]]), self.prefix)


class ResidualProj(nn.Module):
    """The `[1, D]` projection that scores snapshots."""

    def __init__(self, hidden: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=build.dtype, device=build.device), requires_grad=False)
        self.shards = {"weight": Shard((1, hidden), Stored.SMALL)}


def mix(residual: Residual, norm: RmsNorm, proj: ResidualProj) -> Tensor:
    """Softmax-weighted sum of snapshots and running sum, `[T, D]`; the running sum itself while the bank is empty."""
    if residual.bank.shape[0] == 0:
        return residual.prefix
    return attn_res_mix(residual.bank, residual.prefix, norm.weight, proj.weight, norm.eps)
