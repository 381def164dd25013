"""Linear layers of one rank: replicated, column-parallel, row-parallel, with or without a LoRA bypass.

They compute inside a tensor-parallel region (see `k31core.parallel.collectives`) and never communicate: a row-parallel
layer returns this rank's part of the sum, and the caller leaves the region once, bypass included. So the gradient of
every factor that all TP ranks hold alike is a part of a sum over TP, without exception.
"""

import hashlib
from enum import StrEnum

import torch
from torch import Tensor, nn

from k31core.model.build import Build, LoraSpec
from k31core.parallel.sharding import GradSum, Shard, Stored


class Split(StrEnum):
    """Which dimension of a weight `[out, in]` is divided over TP."""

    NONE = "none"
    COLUMN = "column"
    """The output."""
    ROW = "row"
    """The input; the result is a partial sum."""


def padded_linear(x: Tensor, weight: Tensor, row_multiple: int) -> Tensor:
    """x `[N, in]` times weight `[out, in]` transposed, `[N, out]`; computed with N padded to a multiple of
    `row_multiple`.

    On CPU a product of 1-3 rows takes another code path than one of 4 or more (2e-5 apart in fp32); padded, a row has
    the same bits whoever else is in the batch. A weight of another dtype is cast to that of x.
    """
    rows = x.shape[0]
    padding = -rows % row_multiple
    if padding:
        x = nn.functional.pad(x, (0, 0, 0, padding))
    y = nn.functional.linear(x, weight.to(x.dtype))
    return y[:rows] if padding else y


class Linear(nn.Module):
    """A frozen (or, in pre-training, trainable) weight, and its bypass when it is a LoRA target."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        build: Build,
        *,
        split: Split = Split.NONE,
        stored: Stored = Stored.WEIGHT,
        lora: LoraSpec | None = None,
        what: str = "output features",
    ) -> None:
        super().__init__()
        self.row_multiple = build.row_multiple
        shard = _weight_shard((width_out, width_in), split, build, stored, what)
        self.weight = nn.Parameter(
            torch.empty(shard.local_shape, dtype=build.dtype, device=build.device), requires_grad=build.train_base
        )
        self.shards = {"weight": shard}
        self.scaling = 0.0
        self.lora_A: Factor | None = None
        self.lora_B: Factor | None = None
        if lora is not None:
            self.scaling = lora.scaling
            self.lora_A = Factor(_factor_shard((lora.rank, width_in), 1, split is Split.ROW, build), build, lora)
            self.lora_B = Factor(_factor_shard((width_out, lora.rank), 0, split is Split.COLUMN, build), build, lora)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, in]` -> `[N, out]`, of this rank's part."""
        y = padded_linear(x, self.weight, self.row_multiple)
        if self.lora_A is None or self.lora_B is None:
            return y
        low = padded_linear(x, self.lora_A.weight, self.row_multiple)
        return y + padded_linear(low, self.lora_B.weight, self.row_multiple) * self.scaling


class Factor(nn.Module):
    """One LoRA factor, named as in the adapter file (`...lora_A.weight`)."""

    def __init__(self, shard: Shard, build: Build, lora: LoraSpec) -> None:
        super().__init__()
        dtype = lora.dtype or build.dtype
        self.weight = nn.Parameter(torch.zeros(shard.local_shape, dtype=dtype, device=build.device))
        self.shards = {"weight": shard}


def kaiming_rows(name: str, seed: int, rank: int, width: int) -> Tensor:
    """The initial A `[rank, width]` of a logical tensor: uniform in +-1/sqrt(width), from (seed, name) alone, fp32."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.rand(rank, width, generator=generator) * 2 - 1) * width**-0.5


def _weight_shard(shape: tuple[int, int], split: Split, build: Build, stored: Stored, what: str) -> Shard:
    if split is Split.NONE:
        return Shard(shape, stored)
    dim = 0 if split is Split.COLUMN else 1
    start, length = build.mesh.tp.slice_of(shape[dim], what)
    return Shard(shape, stored, dim, start, length)


def _factor_shard(shape: tuple[int, int], dim: int, divided: bool, build: Build) -> Shard:
    if not divided:
        return Shard(shape, Stored.FACTOR, grad_sum=GradSum.STAGE)
    start, length = build.mesh.tp.slice_of(shape[dim], "adapted features")
    return Shard(shape, Stored.FACTOR, dim, start, length, grad_sum=GradSum.DATA)
