"""SiTU-GLU on a GPU: one pass forward (reads a, b; writes y), one pass backward (reads a, b, dy; writes da, db).

An H200 at its copy bandwidth has about 41 instruction slots for an element of the forward and 68 for one of the
backward, so arithmetic decides: tanh is a rational fit without exp or branches, the two constants are compiled in,
and the forward divides once for the whole product.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK, WIDE_BLOCK, WIDE = 2048, 4096, 16384
"""Elements of one row a program handles, and the larger number for rows of at least `WIDE`; as measured."""


@triton.jit
def _bounded(x, BOUND: tl.constexpr):
    """(numerator, denominator) of BOUND * tanh(x / BOUND): a rational fit, 3e-7 of relative error, no branch and no
    exp.

    tanh(x) is 1 to that accuracy beyond |x| = 8.2, where the fit is cut. The denominator is in [1, 200].
    """
    I: tl.constexpr = 1.0 / (BOUND * BOUND)  # folded into the coefficients: x is never divided
    x = tl.minimum(tl.maximum(x, -8.2 * BOUND), 8.2 * BOUND)
    s = x * x
    top = (-5.90704733e-09 * I * I * I * I) * s + (7.0304138e-06 * I * I * I)
    top = (top * s + (0.00267874125 * I * I)) * s + (0.126949336 * I)
    bottom = ((0.000194479415 * I * I * I) * s + (0.0227750259 * I * I)) * s + (0.460280598 * I)
    return x * (top * s + 0.999999737), bottom * s + 1.0


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    """2 ** x; FAST flushes results below the normal range to zero and spares three instructions."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1 / x for x of at least 1; FAST gives 0 above 2 ** 126."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _forward(
    gate, up, out, width, gate_stride, up_stride, blocks,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    na, da = _bounded(a, BETA)
    nb, db = _bounded(b, LINEAR_BETA)
    ds = 1.0 + _exp2(a * -1.4426950408889634, FAST)  # infinite below -88: the quotient is 0 there, as it should be
    y = (na * nb) * _reciprocal(da * db * ds, FAST)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate, up, grad, grad_gate, grad_up, width, gate_stride, up_stride, blocks,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    na, da = _bounded(a, BETA)
    nb, db = _bounded(b, LINEAR_BETA)
    bent, linear = na * _reciprocal(da, FAST), nb * _reciprocal(db, FAST)
    sigmoid = _reciprocal(1.0 + _exp2(a * -1.4426950408889634, FAST), FAST)
    slope_bent = 1.0 - bent * bent * (1.0 / (BETA * BETA))
    slope_linear = 1.0 - linear * linear * (1.0 / (LINEAR_BETA * LINEAR_BETA))
    weighted = dy * sigmoid
    grad_a = weighted * linear * (slope_bent + bent * (1.0 - sigmoid))
    grad_b = weighted * bent * slope_linear
    out = row * width + column
    tl.store(grad_gate + out, grad_a.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + out, grad_b.to(grad_up.dtype.element_ty), mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as `[rows, width]` with unit stride inside a row; halves of one wider tensor stay views."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.contiguous().view(-1, x.shape[-1])


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        a, b = _rows(gate), _rows(up)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        block = WIDE_BLOCK if a.shape[1] >= WIDE else BLOCK
        blocks = triton.cdiv(a.shape[1], block)
        if a.numel():
            _forward[(a.shape[0] * blocks,)](
                a, b, out, a.shape[1], a.stride(0), b.stride(0), blocks,
                BETA=beta, LINEAR_BETA=linear_beta, BLOCK=block, FAST=a.is_cuda, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(gate, up)
        ctx.options = (beta, linear_beta)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.options
        a, b, dy = _rows(gate), _rows(up), grads[0].contiguous()
        grad_gate, grad_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        block = WIDE_BLOCK if a.shape[1] >= WIDE else BLOCK
        blocks = triton.cdiv(a.shape[1], block)
        if a.numel():
            _backward[(a.shape[0] * blocks,)](
                a, b, dy, grad_gate, grad_up, a.shape[1], a.stride(0), b.stride(0), blocks,
                BETA=beta, LINEAR_BETA=linear_beta, BLOCK=block, FAST=a.is_cuda, num_warps=8,
            )  # fmt: skip
        return grad_gate, grad_up, None, None


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """As the reference; bf16 or fp32, gate and up of one shape and dtype, any strides (copied unless 2-D with unit
    rows)."""
    result: torch.Tensor = _SituGlu.apply(gate, up, beta, linear_beta)
    return result
