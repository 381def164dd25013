"""AttnRes mix on a GPU: every row is read once, with a running (online) softmax over the rows.

Forward moves (n + 1) rows in and one out. Backward reads the incoming gradient, the output and the n + 1 rows once
and writes n + 1 gradients; sum_j p_j (dout . row_j) is taken from dout . out, so no row is read twice.

A program walks over `TOKENS` tokens and, for each, over the rows in a pipelined loop: while one row is reduced the
next are copied to shared memory. That needs the rows' addresses in memory, because a kernel's tuple argument cannot
be indexed at run time.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

TOKENS = 4
WARPS_FORWARD = 8
STAGES_FORWARD = 3
WARPS_BACKWARD = 8
STAGES_BACKWARD = 3
REGISTERS = 128
"""A thread, at most: two programs of 8 warps share a multiprocessor, and one loads while the other reduces."""


@triton.jit
def _addresses(rows, table, ROWS: tl.constexpr):
    for j in tl.static_range(ROWS):
        tl.store(table + j, rows[j].to(tl.int64))


@triton.jit
def _direction(norm, proj, direction, D, BLOCK: tl.constexpr):
    """norm * proj in fp32, once a call instead of once a token."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(norm + column, mask=column < D, other=0.0).to(tl.float32)
    b = tl.load(proj + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(direction + column, a * b, mask=column < D)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _forward(
    table, direction, out, weights, inverse, projected, eps, T, D,
    ROWS: tl.constexpr, ROWS_P2: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < D
    slot = tl.arange(0, ROWS_P2)
    toward = tl.load(direction + column, mask=inside, other=0.0)
    first = tl.program_id(0) * TOKENS
    for t in range(0, tl.minimum(TOKENS, T - first)):
        token = first.to(tl.int64) + t
        mixed = tl.zeros([BLOCK], dtype=tl.float32)
        scores = tl.full([ROWS_P2], float("-inf"), dtype=tl.float32)
        inverses = tl.zeros([ROWS_P2], dtype=tl.float32)
        dots = tl.zeros([ROWS_P2], dtype=tl.float32)
        top = -float("inf")
        total = 0.0
        for j in tl.range(0, ROWS, num_stages=STAGES):  # stages given here: loads without a dot are pipelined too
            base = tl.multiple_of(tl.load(table + j).to(tl.pointer_type(out.dtype.element_ty)), 16)
            row = tl.load(base + token * D + column, mask=inside, other=0.0).to(tl.float32)
            square, dot = tl.reduce((row * row, row * toward), 0, _add_pairs)
            scale = tl.rsqrt(square / D + eps)
            score = dot * scale
            new_top = tl.maximum(top, score)
            keep = tl.exp(top - new_top)
            weight = tl.exp(score - new_top)
            mixed = mixed * keep + row * weight
            total = total * keep + weight
            top = new_top
            scores = tl.where(slot == j, score, scores)
            inverses = tl.where(slot == j, scale, inverses)
            dots = tl.where(slot == j, dot, dots)
        tl.store(out + token * D + column, (mixed / total).to(out.dtype.element_ty), mask=inside)
        tl.store(weights + token * ROWS_P2 + slot, tl.exp(scores - top) / total)
        tl.store(inverse + token * ROWS_P2 + slot, inverses)
        tl.store(projected + token * ROWS_P2 + slot, dots)


@triton.jit
def _backward(
    table, grad_table, direction, out, grad_out, weights, inverse, projected, T, D,
    ROWS: tl.constexpr, ROWS_P2: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < D
    toward = tl.load(direction + column, mask=inside, other=0.0)
    first = tl.program_id(0) * TOKENS
    for t in range(0, tl.minimum(TOKENS, T - first)):
        token = first.to(tl.int64) + t
        dy = tl.load(grad_out + token * D + column, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(out + token * D + column, mask=inside, other=0.0).to(tl.float32)
        mean_slope = tl.sum(dy * y, 0)
        for j in tl.range(0, ROWS, num_stages=STAGES):
            base = tl.multiple_of(tl.load(table + j).to(tl.pointer_type(out.dtype.element_ty)), 16)
            row = tl.load(base + token * D + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weights + token * ROWS_P2 + j)
            scale = tl.load(inverse + token * ROWS_P2 + j)
            dot = tl.load(projected + token * ROWS_P2 + j)
            slope = weight * (tl.sum(dy * row, 0) - mean_slope)  # of the loss in this row's score
            gradient = weight * dy + (slope * scale) * toward - (slope * dot * scale * scale * scale / D) * row
            target = tl.multiple_of(tl.load(grad_table + j).to(tl.pointer_type(out.dtype.element_ty)), 16)
            tl.store(target + token * D + column, gradient.to(out.dtype.element_ty), mask=inside)


def _table(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 `[n]` on the device: the addresses of the rows' tensors."""
    table = torch.empty(len(rows), dtype=torch.int64, device=rows[0].device)
    _addresses[(1,)](tuple(rows), table, ROWS=len(rows), num_warps=1)
    return table


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: torch.Tensor, proj: torch.Tensor, eps: float, *rows: torch.Tensor) -> torch.Tensor:
        tokens, hidden = rows[-1].shape
        padded = triton.next_power_of_2(len(rows))
        out = torch.empty_like(rows[-1])
        weights, inverse, projected = torch.empty(3, tokens, padded, dtype=torch.float32, device=out.device)
        direction = torch.empty(hidden, dtype=torch.float32, device=out.device)
        if tokens:
            _direction[(triton.cdiv(hidden, 1024),)](norm, proj, direction, hidden, BLOCK=1024, num_warps=4)
            _forward[(triton.cdiv(tokens, TOKENS),)](
                _table(rows), direction, out, weights, inverse, projected, eps, tokens, hidden,
                ROWS=len(rows), ROWS_P2=padded, BLOCK=triton.next_power_of_2(hidden), STAGES=STAGES_FORWARD,
                TOKENS=TOKENS, num_warps=WARPS_FORWARD, maxnreg=REGISTERS,
            )  # fmt: skip
        ctx.save_for_backward(direction, out, weights, inverse, projected, *rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        direction, out, weights, inverse, projected, *rows = ctx.saved_tensors
        tokens, hidden = out.shape
        grads = tuple(torch.empty_like(row) for row in rows)
        if tokens:
            _backward[(triton.cdiv(tokens, TOKENS),)](
                _table(rows), _table(grads), direction, out, grad_outputs[0].contiguous(), weights, inverse, projected,
                tokens, hidden, ROWS=len(rows), ROWS_P2=weights.shape[1], BLOCK=triton.next_power_of_2(hidden),
                STAGES=STAGES_BACKWARD, TOKENS=TOKENS, num_warps=WARPS_BACKWARD, maxnreg=REGISTERS,
            )  # fmt: skip
        return None, None, None, *grads


def attn_res_mix(
    bank: Sequence[torch.Tensor], prefix: torch.Tensor, norm: torch.Tensor, proj: torch.Tensor, eps: float
) -> torch.Tensor:
    """As the reference, for rows of one dtype; no gradient to the two weights (frozen in LoRA training)."""
    rows = [row.contiguous() for row in (*bank, prefix)]
    result: torch.Tensor = _AttnResMix.apply(norm.contiguous(), proj.reshape(-1).contiguous(), eps, *rows)
    return result
