"""The experts operator on Hopper: the grouped kernels with their autograd, weights packed in both passes.

The forward keeps x and, when a gradient is wanted, the pre-activations w1 x | w3 x in bfloat16 (the activation and its
derivative are recomputed from them). LoRA runs beside: the rows' low-rank projections are small products of their own,
and their second half is one more step of the grouped kernel. Frozen weights get no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k31core.ops.experts import kernel_launch
from k31core.ops.experts.kernel_build import enter_context
from k31core.ops.experts.kernel_launch import LORA_COLUMNS, Groups, LowRank
from k31core.ops.experts.weights import ExpertLora, ExpertShapeError, PackedExperts, check_lora

BETA = 4.0
"""The kernel's SiTU uses that exp(-a) is the square of exp(-2 a / 4)."""


def unsupported(x: Tensor, weights: PackedExperts, lora: ExpertLora | None, beta: float) -> str | None:
    """Why this call cannot use the kernel, or None."""
    if x.dtype != torch.bfloat16:
        return f"rows are {x.dtype}, the kernel takes bfloat16"
    if beta != BETA:
        return f"the gate's beta is {beta}, the kernel is built for {BETA}"
    multiple = kernel_launch.FEATURE_MULTIPLE
    if weights.latent % multiple or weights.ffn % multiple:
        return f"latent {weights.latent} and FFN {weights.ffn} must be multiples of {multiple}"
    if weights.num_experts > kernel_launch.MAX_EXPERTS:
        return f"{weights.num_experts} experts, the kernel takes at most {kernel_launch.MAX_EXPERTS}"
    if lora is not None and lora.w1_A.shape[1] > LORA_COLUMNS:
        return f"LoRA rank {lora.w1_A.shape[1]}, the kernel takes at most {LORA_COLUMNS}"
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return f"{torch.cuda.get_device_name(x.device)} is not a Hopper GPU (compute capability 9.0)"
    return None


def expert_mlp_kernel(
    x: Tensor, counts: Tensor, weights: PackedExperts, *, lora: ExpertLora | None, linear_beta: float
) -> Tensor:
    """y `[N, L]` bfloat16 as `expert_mlp`; counts int64 `[E]` stay on the device and must add up to N.

    The sum is not checked here (that would wait for the device); rows past N are never touched, rows no expert owns are
    left undefined.
    """
    if x.ndim != 2 or x.shape[1] != weights.latent:
        raise ExpertShapeError(f"x must be [N, {weights.latent}], got shape {tuple(x.shape)}")
    if counts.dtype != torch.int64 or counts.shape != (weights.num_experts,):
        raise ExpertShapeError(
            f"counts must be int64 [{weights.num_experts}], got {counts.dtype} {tuple(counts.shape)}"
        )
    check_lora(lora, weights.num_experts, weights.ffn, weights.latent)
    x = x.contiguous()
    groups = Groups.of(x, counts, weights, linear_beta)
    factors = lora.factors() if lora else ()
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *factors))
    with torch.cuda.device(x.device):  # the driver launches in the current context
        return _ExpertMlp.apply(x, groups, wanted, lora.scaling if lora else 0.0, *factors)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, groups: Groups, wanted: bool, scaling: float, *factors: Tensor) -> Tensor:
        weights = groups.weights
        enter_context(x.device.index)
        h = x.new_empty(groups.rows, weights.ffn)
        pre = x.new_empty(groups.rows, 2 * weights.ffn) if wanted else None
        y = torch.empty_like(x)
        side = _Side.of(factors, scaling, weights) if factors else None
        inner = side.inner(x) if side else None
        kernel_launch.gate(groups, x, inner, h, pre)
        outer = side.outer(h, groups.counts) if side else None
        kernel_launch.down(groups, h, outer, y)
        if wanted:
            kept = (inner.rows, outer.rows) if inner and outer else ()
            ctx.save_for_backward(x, pre, *kept, *factors)
            ctx.groups, ctx.scaling = groups, scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, pre, *saved = ctx.saved_tensors
        groups: Groups = ctx.groups
        enter_context(x.device.index)
        dy = dy.contiguous()
        dpre = torch.empty_like(pre)
        dx = torch.empty_like(x)
        if not saved:
            kernel_launch.down_backward(groups, dy, None, pre, dpre, None)
            kernel_launch.gate_backward(groups, dpre, None, dx)
            return dx, None, None, None
        u, t, *factors = saved
        side = _Side.of(factors, ctx.scaling, groups.weights)
        h = x.new_empty(groups.rows, groups.weights.ffn)
        outer = side.outer_backward(dy)
        kernel_launch.down_backward(groups, dy, outer, pre, dpre, h)
        inner = side.inner_backward(dpre, groups.counts)
        kernel_launch.gate_backward(groups, dpre, inner, dx)
        grads = side.gradients((x, dpre, h, dy), (u, t, outer.rows, inner.rows), groups.counts)
        needed = ctx.needs_input_grad[4:]
        return dx, None, None, None, *(g if need else None for g, need in zip(grads, needed, strict=True))


@dataclass(slots=True)
class _Side:
    """The LoRA factors of one call and the products that have the rank as a width; `scaling` is in every projection."""

    factors: tuple[Tensor, ...] | list[Tensor]
    scaling: float
    rank: int
    ffn: int
    latent: int

    @staticmethod
    def of(factors: tuple[Tensor, ...] | list[Tensor], scaling: float, weights: PackedExperts) -> "_Side":
        return _Side(factors, scaling, factors[0].shape[1], weights.ffn, weights.latent)

    def _inner_down(self) -> Tensor:
        """A of w1 over A of w3, each padded to 32 rows: `[64, L]`."""
        from k31core.ops.experts.kernel_lora import padded

        return torch.cat([padded(self.factors[i][0], LORA_COLUMNS, self.latent) for i in (0, 2)])

    def inner(self, x: Tensor) -> LowRank:
        from k31core.ops.experts.kernel_lora import padded

        down = self._inner_down()
        u = x.new_empty(x.shape[0], 2 * LORA_COLUMNS)
        torch.addmm(u, x, down.t(), beta=0, alpha=self.scaling, out=u)
        return LowRank(u, *(padded(self.factors[i], self.ffn, LORA_COLUMNS) for i in (1, 3)))

    def outer(self, h: Tensor, counts: Tensor) -> LowRank:
        from k31core.ops.experts.kernel_lora import padded, project

        t = h.new_empty(h.shape[0], LORA_COLUMNS)
        project(h, self.factors[4].transpose(1, 2), counts, self.scaling, t)
        return LowRank(t, padded(self.factors[5], self.latent, LORA_COLUMNS))

    def outer_backward(self, dy: Tensor) -> LowRank:
        from k31core.ops.experts.kernel_lora import padded

        up = padded(self.factors[5], self.latent, LORA_COLUMNS)[0]
        dt = dy.new_empty(dy.shape[0], LORA_COLUMNS)
        torch.addmm(dt, dy, up, beta=0, alpha=self.scaling, out=dt)
        return LowRank(dt, padded(self.factors[4].transpose(1, 2), self.ffn, LORA_COLUMNS))

    def inner_backward(self, dpre: Tensor, counts: Tensor) -> LowRank:
        from k31core.ops.experts.kernel_lora import project

        du = dpre.new_empty(dpre.shape[0], 2 * LORA_COLUMNS)
        for i, half in enumerate((1, 3)):
            columns = slice(i * LORA_COLUMNS, (i + 1) * LORA_COLUMNS)
            project(
                dpre[:, i * self.ffn : (i + 1) * self.ffn], self.factors[half], counts, self.scaling, du[:, columns]
            )
        return LowRank(du, self._inner_down().t().contiguous().unsqueeze(0))

    def gradients(self, wide: tuple[Tensor, ...], low: tuple[Tensor, ...], counts: Tensor) -> tuple[Tensor, ...]:
        """Gradients in the order of `ExpertLora.factors` and each factor's dtype.

        Accumulated in float32; the shared factors' sums over all rows are rounded to bfloat16 once at the end.
        """
        from k31core.ops.experts.kernel_lora import outer

        x, dpre, h, dy = wide
        u, t, dt, du = low
        grads = [torch.empty_like(f, memory_format=torch.contiguous_format) for f in self.factors]
        d_down = du.t() @ x
        grads[0][0], grads[2][0] = d_down[: self.rank], d_down[LORA_COLUMNS : LORA_COLUMNS + self.rank]
        outer(dpre[:, : self.ffn], u, counts, grads[1])
        outer(dpre[:, self.ffn :], u[:, LORA_COLUMNS:], counts, grads[3])
        outer(h, dt, counts, grads[4].transpose(1, 2))
        grads[5][0] = (dy.t() @ t)[:, : self.rank]
        return tuple(grads)
