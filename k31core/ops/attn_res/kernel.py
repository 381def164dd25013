"""AttnRes mix on a GPU: one program a token reads every row once, with a running (online) softmax over the rows.

Forward moves (n + 1) rows in and one out. Backward reads the incoming gradient, the output and the n + 1 rows once
and writes n + 1 gradients; sum_j p_j (dout . row_j) is taken from dout . out, so no row is read twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

WARPS = 8


@triton.jit
def _forward(
    rows, norm, proj, out, weights, inverse, eps, D, ROWS: tl.constexpr, ROWS_P2: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    slot = tl.arange(0, ROWS_P2)
    direction = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    direction *= tl.load(proj + column, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros([BLOCK], dtype=tl.float32)
    scores = tl.full([ROWS_P2], float("-inf"), dtype=tl.float32)
    inverses = tl.zeros([ROWS_P2], dtype=tl.float32)
    top = -float("inf")
    total = 0.0
    for j in tl.static_range(ROWS):
        row = tl.load(rows[j] + token * D + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        score = tl.sum(row * direction, 0) * scale
        new_top = tl.maximum(top, score)
        keep = tl.exp(top - new_top)
        weight = tl.exp(score - new_top)
        mixed = mixed * keep + row * weight
        total = total * keep + weight
        top = new_top
        scores = tl.where(slot == j, score, scores)
        inverses = tl.where(slot == j, scale, inverses)
    tl.store(out + token * D + column, (mixed / total).to(out.dtype.element_ty), mask=inside)
    tl.store(weights + token * ROWS_P2 + slot, tl.exp(scores - top) / total)
    tl.store(inverse + token * ROWS_P2 + slot, inverses)


@triton.jit
def _backward(
    rows, grads, norm, proj, out, grad_out, weights, inverse, D,
    ROWS: tl.constexpr, ROWS_P2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    direction = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    direction *= tl.load(proj + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad_out + token * D + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + token * D + column, mask=inside, other=0.0).to(tl.float32)
    mean_slope = tl.sum(dy * y, 0)
    for j in tl.static_range(ROWS):
        row = tl.load(rows[j] + token * D + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + token * ROWS_P2 + j)
        scale = tl.load(inverse + token * ROWS_P2 + j)
        slope = weight * (tl.sum(dy * row, 0) - mean_slope)  # of the loss in this row's score
        projected = tl.sum(row * direction, 0)
        shrink = slope * projected * scale * scale * scale / D
        gradient = weight * dy + (slope * scale) * direction - shrink * row
        tl.store(grads[j] + token * D + column, gradient.to(grads[j].dtype.element_ty), mask=inside)


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: torch.Tensor, proj: torch.Tensor, eps: float, *rows: torch.Tensor) -> torch.Tensor:
        tokens, hidden = rows[-1].shape
        padded = triton.next_power_of_2(len(rows))
        out = torch.empty_like(rows[-1])
        weights, inverse = (torch.empty(tokens, padded, dtype=torch.float32, device=out.device) for _ in range(2))
        if tokens:
            _forward[(tokens,)](
                rows, norm, proj, out, weights, inverse, eps, hidden,
                ROWS=len(rows), ROWS_P2=padded, BLOCK=triton.next_power_of_2(hidden), num_warps=WARPS,
            )  # fmt: skip
        ctx.save_for_backward(norm, proj, out, weights, inverse, *rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        norm, proj, out, weights, inverse, *rows = ctx.saved_tensors
        tokens, hidden = out.shape
        grads = tuple(torch.empty_like(row) for row in rows)
        if tokens:
            _backward[(tokens,)](
                tuple(rows), grads, norm, proj, out, grad_outputs[0].contiguous(), weights, inverse, hidden,
                ROWS=len(rows), ROWS_P2=weights.shape[1], BLOCK=triton.next_power_of_2(hidden), num_warps=WARPS,
            )  # fmt: skip
        return None, None, None, *grads


def attn_res_mix(
    bank: Sequence[torch.Tensor], prefix: torch.Tensor, norm: torch.Tensor, proj: torch.Tensor, eps: float
) -> torch.Tensor:
    """As the reference, for rows of one dtype; no gradient to the two weights (frozen in LoRA training)."""
    rows = [row.contiguous() for row in (*bank, prefix)]
    result: torch.Tensor = _AttnResMix.apply(norm.contiguous(), proj.reshape(-1).contiguous(), eps, *rows)
    return result
