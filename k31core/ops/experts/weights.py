"""The records the experts operator takes: frozen packed weights, dense weights, and the shared-outer LoRA factors.

Legend: E local experts, L latent width, F expert FFN width, r LoRA rank. Validated on construction, so build them once
a layer and keep them; the bytes of a scale are checked where they are loaded (`k31core.ops.mxfp4.check_scale`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from k31core.ops.mxfp4 import BLOCK


class ExpertShapeError(ValueError):
    """An argument of the experts operator that does not fit the others: names it, its shape and the shape expected."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """MXFP4 experts as published: u8 codes and u8 scales, input dimension last, contiguous."""

    w1_packed: Tensor
    """Gate `[E, F, L/2]`."""
    w1_scale: Tensor
    """`[E, F, L/32]`."""
    w3_packed: Tensor
    """Up `[E, F, L/2]`."""
    w3_scale: Tensor
    """`[E, F, L/32]`."""
    w2_packed: Tensor
    """Down `[E, L, F/2]`."""
    w2_scale: Tensor
    """`[E, L, F/32]`."""

    def __post_init__(self) -> None:
        if self.w1_packed.ndim != 3 or self.w2_packed.ndim != 3:
            raise ExpertShapeError(f"w1_packed must be [E, F, L/2], got shape {tuple(self.w1_packed.shape)}")
        experts, ffn, latent = self.num_experts, self.ffn, self.latent
        if ffn % BLOCK or latent % BLOCK:
            raise ExpertShapeError(f"latent {latent} and FFN width {ffn} must be multiples of the MXFP4 block, {BLOCK}")
        gate, down = (experts, ffn, latent), (experts, latent, ffn)
        for name, (rows, width) in {"w1": (gate[:2], latent), "w3": (gate[:2], latent), "w2": (down[:2], ffn)}.items():
            for part, columns in (("packed", width // 2), ("scale", width // BLOCK)):
                _check(f"{name}_{part}", getattr(self, f"{name}_{part}"), (*rows, columns), torch.uint8)

    @property
    def num_experts(self) -> int:
        return self.w1_packed.shape[0]

    @property
    def ffn(self) -> int:
        return self.w1_packed.shape[1]

    @property
    def latent(self) -> int:
        return self.w1_packed.shape[2] * 2

    def tensors(self) -> tuple[Tensor, ...]:
        """The six tensors in field order."""
        return self.w1_packed, self.w1_scale, self.w3_packed, self.w3_scale, self.w2_packed, self.w2_scale


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Experts in floating point that may be trained themselves (the tiny checkpoint's pre-training)."""

    w1: Tensor
    """Gate `[E, F, L]`."""
    w3: Tensor
    """Up `[E, F, L]`."""
    w2: Tensor
    """Down `[E, L, F]`."""

    def __post_init__(self) -> None:
        if self.w1.ndim != 3:
            raise ExpertShapeError(f"w1 must be [E, F, L], got shape {tuple(self.w1.shape)}")
        _check("w3", self.w3, tuple(self.w1.shape), self.w1.dtype)
        _check("w2", self.w2, (self.num_experts, self.latent, self.ffn), self.w1.dtype)

    @property
    def num_experts(self) -> int:
        return self.w1.shape[0]

    @property
    def ffn(self) -> int:
        return self.w1.shape[1]

    @property
    def latent(self) -> int:
        return self.w1.shape[2]


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """Low-rank bypass with the outer factors shared over the experts: W_e x + scaling * B_e (A_e x)."""

    w1_A: Tensor
    """`[1, r, L]`, shared."""
    w1_B: Tensor
    """`[E, F, r]`."""
    w3_A: Tensor
    """`[1, r, L]`, shared; not tied to `w1_A`."""
    w3_B: Tensor
    """`[E, F, r]`."""
    w2_A: Tensor
    """`[E, r, F]`."""
    w2_B: Tensor
    """`[1, L, r]`, shared."""
    scaling: float
    """alpha / rank."""

    def factors(self) -> tuple[Tensor, ...]:
        """The six factors in field order."""
        return self.w1_A, self.w1_B, self.w3_A, self.w3_B, self.w2_A, self.w2_B


Experts = PackedExperts | DenseExperts


def check_call(x: Tensor, counts: Tensor, weights: Experts, lora: ExpertLora | None) -> list[int]:
    """Rows of each expert as a list, after checking that every argument fits; raises `ExpertShapeError`."""
    experts, ffn, latent = weights.num_experts, weights.ffn, weights.latent
    if x.ndim != 2 or x.shape[1] != latent:
        raise ExpertShapeError(f"x must be [N, {latent}], got shape {tuple(x.shape)}")
    if counts.dtype != torch.int64 or counts.shape != (experts,):
        raise ExpertShapeError(f"counts must be int64 [{experts}], got {counts.dtype} {tuple(counts.shape)}")
    rows: list[int] = counts.tolist()
    if min(rows, default=0) < 0 or sum(rows) != x.shape[0]:
        raise ExpertShapeError(f"counts must be >= 0 and add up to the {x.shape[0]} rows of x, got {rows}")
    check_lora(lora, experts, ffn, latent)
    return rows


def check_lora(lora: ExpertLora | None, experts: int, ffn: int, latent: int) -> None:
    """Raise `ExpertShapeError` unless every factor has the shape its name promises."""
    if lora is None:
        return
    rank = lora.w1_A.shape[1] if lora.w1_A.ndim == 3 else -1
    expected = ((1, rank, latent), (experts, ffn, rank)) * 2 + ((experts, rank, ffn), (1, latent, rank))
    names = ("w1_A", "w1_B", "w3_A", "w3_B", "w2_A", "w2_B")
    for name, factor, shape in zip(names, lora.factors(), expected, strict=True):
        if factor.shape != shape:
            raise ExpertShapeError(f"lora.{name} must be {list(shape)}, got {list(factor.shape)}")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ExpertShapeError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    if dtype == torch.uint8 and not tensor.is_contiguous():
        raise ExpertShapeError(
            f"{name} must be contiguous, got strides {tensor.stride()}: call .contiguous() once at load"
        )
