"""Gradients after the backward passes: summed over the ranks that share a factor, measured, checked, clipped.

The loss of every rank is divided by the global token count already, so gradients are summed, never averaged.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from k31core.parallel.groups import first_complaint
from k31core.parallel.mesh import Axis, Mesh
from k31core.parallel.sharding import GradSum, Slot

_BUCKET_ELEMENTS = 64 * 1024 * 1024
"""Gradients that travel in one all-reduce: 256 MiB in fp32."""


class NonFiniteGradientError(ArithmeticError):
    """A gradient is NaN or infinite: names the factor. No state was changed."""


class ZeroGradientError(ArithmeticError):
    """The first step's gradients are not what B = 0 implies: names the factor. No state was changed."""


class GradientSums:
    """Collects the gradients of one step's backward passes in fp32, whatever the factors are kept in.

    Use as a context manager around the backward passes. fp32 factors accumulate in `.grad`; half-precision ones are
    added to an fp32 sum after every backward, since a half-precision sum over microbatches loses small terms.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._sums: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for slot in self._slots:
            slot.tensor.grad = None  # of an earlier, perhaps failed, step
            if slot.tensor.dtype != torch.float32:
                self._hooks.append(slot.tensor.register_post_accumulate_grad_hook(self._add))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            slot.tensor.grad = None

    def collect(self, mesh: Mesh) -> list[Tensor]:
        """Gradients in slot order, summed over the ranks that share each factor; zeros where there is none."""
        gradients = [self._one(slot.tensor) for slot in self._slots]
        for kind in GradSum:
            axis = _shared_axis(kind, mesh)
            if axis.size > 1:
                _sum_over([g for s, g in zip(self._slots, gradients) if s.shard.grad_sum is kind], axis)
        return gradients

    def _one(self, factor: Tensor) -> Tensor:
        found = factor.grad if factor.dtype == torch.float32 else self._sums.get(id(factor))
        return torch.zeros_like(factor, dtype=torch.float32, requires_grad=False) if found is None else found

    def _add(self, factor: Tensor) -> None:
        assert factor.grad is not None
        wide = factor.grad.float()
        factor.grad = None
        held = self._sums.setdefault(id(factor), wide)
        if held is not wide:
            held.add_(wide)


def global_norm(slots: Sequence[Slot], gradients: Sequence[Tensor], mesh: Mesh) -> float:
    """Euclidean norm over all logical factors of all ranks, each entry once; summed in fp64.

    Raises `NonFiniteGradientError`, on every rank, when any gradient is not finite.
    """
    squares = torch.stack(
        [
            torch.linalg.vector_norm(g, dtype=torch.float64).square() / _shared_axis(s.shard.grad_sum, mesh).size
            for s, g in zip(slots, gradients)
        ]
    )
    total = squares.sum()
    for axis in (mesh.stage, mesh.pp):
        if axis.size > 1:
            dist.all_reduce(total, group=axis.group)
    norm = float(total.sqrt())
    if not norm < float("inf"):
        broken = [s.name for s, finite in zip(slots, squares.isfinite().tolist()) if not finite]
        # The norm is one number for all ranks, so all of them are here and can learn the name.
        where = first_complaint(f"{broken[0]} and {len(broken) - 1} more" if broken else None)
        raise NonFiniteGradientError(
            f"the gradient of {where or 'no single factor, but their norm,'} is not finite: the step was not taken, "
            "adapter and optimizer are unchanged"
        )
    return norm


def clip_gradients(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale in place so that the norm is at most `limit`; a smaller norm changes nothing."""
    if norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)


def prove_first_gradients(slots: Sequence[Slot], gradients: Sequence[Tensor], mesh: Mesh) -> str:
    """Check what must hold before the first update: every B has a gradient, and while all B are zero, no A has one.

    Catches a bypass that is not connected, and recomputation that silently drops every adapter gradient. Returns a
    sentence for the log. Raises `ZeroGradientError` naming the first factor.
    """
    live = _flags([bool(g.any()) for g in gradients], slots, mesh)
    set_ = _flags([bool(s.tensor.detach().any()) for s in slots], slots, mesh)
    second = [".lora_B." in s.name for s in slots]
    dead = [s.name for s, is_b, alive in zip(slots, second, live) if is_b and not alive]
    if dead:
        raise ZeroGradientError(
            f"the gradient of {dead[0]} and {len(dead) - 1} more B factors is exactly zero in the first step: "
            "their modules are not reached by the loss; nothing was changed"
        )
    fresh = not any(value for value, is_b in zip(set_, second) if is_b)
    if not fresh:
        return f"first step: all {sum(second)} B factors have a gradient (warm start: nothing follows for A)"
    moved = [s.name for s, is_b, alive in zip(slots, second, live) if not is_b and alive]
    if moved:
        raise ZeroGradientError(
            f"the gradient of {moved[0]} and {len(moved) - 1} more A factors is not zero although every B is: "
            "the bypass is wired wrongly; nothing was changed"
        )
    return (
        f"first step: all {sum(second)} B factors have a gradient, all {len(slots) - sum(second)} A factors have none"
    )


def _shared_axis(kind: GradSum | None, mesh: Mesh) -> Axis:
    """Ranks that hold the same part of a factor."""
    return {
        GradSum.DATA: mesh.data,
        GradSum.STAGE: mesh.stage,
        GradSum.EXPERT: mesh.expert_dp,
        None: Axis(),
    }[kind]


def _sum_over(gradients: list[Tensor], axis: Axis) -> None:
    bucket: list[Tensor] = []
    size = 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or size + gradient.numel() > _BUCKET_ELEMENTS):
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat, group=axis.group)
            for target, part in zip(bucket, flat.split([g.numel() for g in bucket])):
                target.copy_(part.view_as(target))
            bucket, size = [], 0
        if gradient is not None:
            bucket.append(gradient)
            size += gradient.numel()


def _flags(values: list[bool], slots: Sequence[Slot], mesh: Mesh) -> list[bool]:
    """Whether any rank of the stage has the flag for the same logical factor (a rank may hold idle experts only)."""
    if mesh.stage.size == 1:
        return values
    device = slots[0].tensor.device
    flags = torch.tensor(values, dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.stage.group)
    return [bool(flag) for flag in flags.tolist()]
