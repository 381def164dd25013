"""Attention over selected latent rows on a GPU (MQA form): a query's heads share each gathered row, forward and
backward.

One program handles one query and `HEADS` of its heads. The latent row is key (all of it) and value (its first L
numbers), so a selected row is read once for both. The gradient of the latent rows is summed with fp32 atomics: its
last bits depend on the order in which queries finish.
"""

from typing import Any

import torch
import triton
import triton.language as tl

HEADS = 32
"""Heads a program; more make the register tiles spill."""
KEYS_FORWARD = 32
WARPS_FORWARD = 4
STAGES_FORWARD = 2
KEYS_BACKWARD = 32
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _forward(
    q, kv, indices, out, lse, heads, topk, scale,
    L: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, TOPK_P2: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    latent, extra = tl.arange(0, L), tl.arange(0, R)
    q_row = q + (query * heads + head)[:, None] * (L + R)
    q_latent = tl.load(q_row + latent[None, :], mask=real[:, None], other=0.0)
    q_extra = tl.load(q_row + L + extra[None, :], mask=real[:, None], other=0.0)
    every = tl.arange(0, TOPK_P2)
    named = tl.load(indices + query * topk + every, mask=every < topk, other=-1)
    used = tl.max(tl.where(named >= 0, every + 1, 0), 0)
    top = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    mixed = tl.zeros([HEADS, L], dtype=tl.float32)
    for begin in range(0, used, KEYS):
        slot = begin + tl.arange(0, KEYS)
        index = tl.load(indices + query * topk + slot, mask=slot < used, other=-1)
        seen = index >= 0
        row = kv + index.to(tl.int64)[:, None] * (L + R)
        kv_latent = tl.load(row + latent[None, :], mask=seen[:, None], other=0.0)
        kv_extra = tl.load(row + L + extra[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q_extra, tl.trans(kv_extra))
        scores = tl.dot(q_latent, tl.trans(kv_latent), scores) * (scale * LOG2E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        keep = tl.exp2(top - safe)
        total = total * keep + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(kv_latent.dtype), kv_latent, mixed * keep[:, None])
        top = new_top
    safe_total = tl.where(total == 0.0, 1.0, total)
    at = (query * heads + head)[:, None] * L + latent[None, :]
    tl.store(out + at, (mixed / safe_total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + query * heads + head, tl.where(total == 0.0, 0.0, top) + tl.log2(safe_total), mask=real)


@triton.jit
def _backward(
    q, kv, indices, out, grad_out, lse, grad_q, grad_kv, heads, topk, scale,
    L: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, TOPK_P2: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    latent, extra = tl.arange(0, L), tl.arange(0, R)
    q_row = (query * heads + head)[:, None] * (L + R)
    at = (query * heads + head)[:, None] * L + latent[None, :]
    q_latent = tl.load(q + q_row + latent[None, :], mask=real[:, None], other=0.0)
    q_extra = tl.load(q + q_row + L + extra[None, :], mask=real[:, None], other=0.0)
    dy = tl.load(grad_out + at, mask=real[:, None], other=0.0)
    y = tl.load(out + at, mask=real[:, None], other=0.0)
    mean_slope = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    level = tl.load(lse + query * heads + head, mask=real, other=0.0)
    every = tl.arange(0, TOPK_P2)
    named = tl.load(indices + query * topk + every, mask=every < topk, other=-1)
    used = tl.max(tl.where(named >= 0, every + 1, 0), 0)
    dq_latent = tl.zeros([HEADS, L], dtype=tl.float32)
    dq_extra = tl.zeros([HEADS, R], dtype=tl.float32)
    for begin in range(0, used, KEYS):
        slot = begin + tl.arange(0, KEYS)
        index = tl.load(indices + query * topk + slot, mask=slot < used, other=-1)
        seen = index >= 0
        row = index.to(tl.int64)[:, None] * (L + R)
        kv_latent = tl.load(kv + row + latent[None, :], mask=seen[:, None], other=0.0)
        kv_extra = tl.load(kv + row + L + extra[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q_extra, tl.trans(kv_extra))
        scores = tl.dot(q_latent, tl.trans(kv_latent), scores) * (scale * LOG2E)
        visible = seen[None, :] & real[:, None]
        weights = tl.where(visible, tl.exp2(scores - level[:, None]), 0.0)
        slopes = weights * (tl.dot(dy, tl.trans(kv_latent)) - mean_slope[:, None]) * scale
        weights_low, slopes_low = weights.to(dy.dtype), slopes.to(dy.dtype)
        dq_latent = tl.dot(slopes_low, kv_latent, dq_latent)
        dq_extra = tl.dot(slopes_low, kv_extra, dq_extra)
        d_latent = tl.dot(tl.trans(slopes_low), q_latent)
        d_latent = tl.dot(tl.trans(weights_low), dy, d_latent)
        tl.atomic_add(grad_kv + row + latent[None, :], d_latent, mask=seen[:, None], sem="relaxed")
        d_extra = tl.dot(tl.trans(slopes_low), q_extra)
        tl.atomic_add(grad_kv + row + L + extra[None, :], d_extra, mask=seen[:, None], sem="relaxed")
    tl.store(grad_q + q_row + latent[None, :], dq_latent.to(grad_q.dtype.element_ty), mask=real[:, None])
    tl.store(grad_q + q_row + L + extra[None, :], dq_extra.to(grad_q.dtype.element_ty), mask=real[:, None])


class _SparseLatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, value_width: int
    ) -> torch.Tensor:
        queries, heads, width = q.shape
        out = torch.empty(queries, heads, value_width, dtype=q.dtype, device=q.device)
        lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
        topk = indices.shape[1]
        if queries:
            _forward[(queries, triton.cdiv(heads, HEADS))](
                q, kv, indices, out, lse, heads, topk, scale, L=value_width, R=width - value_width, HEADS=HEADS,
                KEYS=KEYS_FORWARD, TOPK_P2=triton.next_power_of_2(topk),
                num_warps=WARPS_FORWARD, num_stages=STAGES_FORWARD,
            )  # fmt: skip
        ctx.save_for_backward(q, kv, indices, out, lse)
        ctx.options = (scale, value_width)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, kv, indices, out, lse = ctx.saved_tensors
        scale, value_width = ctx.options
        queries, heads, width = q.shape
        grad_q = torch.empty_like(q)
        grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        topk = indices.shape[1]
        if queries:
            _backward[(queries, triton.cdiv(heads, HEADS))](
                q, kv, indices, out, grads[0].contiguous(), lse, grad_q, grad_kv, heads, topk, scale,
                L=value_width, R=width - value_width, HEADS=HEADS, KEYS=KEYS_BACKWARD,
                TOPK_P2=triton.next_power_of_2(topk), num_warps=8, num_stages=1,
            )  # fmt: skip
        return grad_q, grad_kv.to(kv.dtype), None, None, None


def sparse_latent_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, *, scale: float, value_width: int
) -> torch.Tensor:
    """As the reference, bf16; value_width and the rest of the row are powers of two of at least 16."""
    result: torch.Tensor = _SparseLatentAttention.apply(
        q.contiguous(), kv.contiguous(), indices.contiguous(), scale, value_width
    )
    return result
