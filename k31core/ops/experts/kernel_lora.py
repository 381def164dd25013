"""Triton kernels for the low-rank side of the experts: per-expert products whose one width is the LoRA rank (<= 32).

They read the wide rows once, so they are bound by memory; the low-rank products themselves join the grouped kernel.
Legend: N rows sorted by expert, E experts, K the wide width, r the rank, 32 the padded rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32


@triton.jit
def _project_kernel(
    x_ptr, w_ptr, out_ptr, counts_ptr, rows, experts, width, rank, alpha,
    x_stride, w_stride_e, w_stride_k, w_stride_r, out_stride,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + index, mask=index < experts, other=0).to(tl.int32)
    tiles = (counts + BLOCK_N - 1) // BLOCK_N
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < experts:
        first_tile = tl.sum(tl.where(index < expert, tiles, 0), 0)
        first_row = tl.sum(tl.where(index < expert, counts, 0), 0)
        count = tl.sum(tl.where(index == expert, counts, 0), 0)
        local = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = first_row + local
        live = (local < count) & (row < rows)
        column = tl.arange(0, COLUMNS)
        acc = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
        x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
        w_expert = w_ptr + expert.to(tl.int64) * w_stride_e
        for start in range(0, width, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < width)[None, :], other=0.0)
            w = tl.load(
                w_expert + k[:, None] * w_stride_k + column[None, :] * w_stride_r,
                mask=(k < width)[:, None] & (column < rank)[None, :],
                other=0.0,
            )
            acc = tl.dot(x, w.to(x.dtype), acc)
        out = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(out, (acc * alpha).to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _outer_kernel(
    x_ptr, u_ptr, out_ptr, counts_ptr, rows, experts, width, rank,
    x_stride, u_stride, out_stride_e, out_stride_k, out_stride_r,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    index = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + index, mask=index < experts, other=0).to(tl.int32)
    first_row = tl.sum(tl.where(index < expert, counts, 0), 0)
    count = tl.sum(tl.where(index == expert, counts, 0), 0)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.arange(0, COLUMNS)
    acc = tl.zeros((BLOCK_K, COLUMNS), dtype=tl.float32)
    for start in range(0, count, BLOCK_N):
        local = start + tl.arange(0, BLOCK_N)
        row = (first_row + local).to(tl.int64)
        live = (local < count) & (row < rows)
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=live[:, None] & (k < width)[None, :], other=0.0)
        u = tl.load(u_ptr + row[:, None] * u_stride + column[None, :], mask=live[:, None], other=0.0)
        acc = tl.dot(tl.trans(x), u, acc)
    out = out_ptr + expert.to(tl.int64) * out_stride_e + k[:, None] * out_stride_k + column[None, :] * out_stride_r
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(k < width)[:, None] & (column < rank)[None, :])


def project(x: Tensor, weight: Tensor, counts: Tensor, alpha: float, out: Tensor) -> None:
    """out `[N, 32]` = alpha * x_e weight_e for x `[N, K]` and weight `[E, K, r]`; columns from r on become zero.

    x and out may be column ranges of wider rows (last stride 1); weight may have any strides.
    """
    rows, width = x.shape
    experts, _, rank = weight.shape
    block_rows = 64
    grid = (triton.cdiv(rows, block_rows) + experts,)
    _project_kernel[grid](
        x, weight, out, counts, rows, experts, width, rank, alpha,
        x.stride(0), *weight.stride(), out.stride(0),
        BLOCK_E=triton.next_power_of_2(experts), BLOCK_N=block_rows, BLOCK_K=128, COLUMNS=_COLUMNS,
        num_warps=4, num_stages=4,
    )  # fmt: skip


def outer(x: Tensor, u: Tensor, counts: Tensor, out: Tensor) -> None:
    """out `[E, K, r]` (any strides) = x_e^T u_e for x `[N, K]` and u `[N, >= 32]`, each with last stride 1."""
    rows, width = x.shape
    experts, _, rank = out.shape
    block = 128
    _outer_kernel[(triton.cdiv(width, block), experts)](
        x, u, out, counts, rows, experts, width, rank,
        x.stride(0), u.stride(0), *out.stride(),
        BLOCK_E=triton.next_power_of_2(experts), BLOCK_N=64, BLOCK_K=block, COLUMNS=_COLUMNS,
        num_warps=4, num_stages=4,
    )  # fmt: skip


def padded(factor: Tensor, rows: int, columns: int) -> Tensor:
    """The factor in bfloat16, its last two dimensions zero-padded to `rows` x `columns`, contiguous."""
    missing_rows, missing_columns = rows - factor.shape[-2], columns - factor.shape[-1]
    return torch.nn.functional.pad(factor.to(torch.bfloat16), (0, missing_columns, 0, missing_rows)).contiguous()
