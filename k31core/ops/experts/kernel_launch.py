"""Launches the four grouped products of `kernel_grouped.cu` on torch tensors.

Legend: N rows sorted by expert, E experts, L latent, F FFN width; every tensor is contiguous and on one device. The
low-rank operands are padded to 32 columns a factor (`LORA_COLUMNS`): u `[N, 64]` holds the gate's 32 and the up's 32.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from k31core.ops.experts.kernel_build import TileSet, check_driver, choose_tiles, driver, kernel_function
from k31core.ops.experts.weights import PackedExperts

LORA_COLUMNS = 32
FEATURE_MULTIPLE = 512
"""Latent and FFN width must be multiples: the producer reads 16 scale bytes (512 inputs) at a time."""
MAX_EXPERTS = 256

_UINT8, _BFLOAT16 = 0, 9  # CUtensorMapDataType
_SWIZZLE_32, _SWIZZLE_128 = 1, 3
_PROMOTE_128, _PROMOTE_256 = 2, 3


class _Params(ctypes.Structure):
    """Mirror of `Params` in the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("counts", "scale0", "scale1", "lora0", "lora1", "pre_in", "out", "extra")
        ),
        *((name, ctypes.c_int) for name in ("rows", "experts", "latent", "ffn", "lora_stride")),
        ("linear_beta", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """What the four products of one call share."""

    counts: Tensor
    """int64 `[E]`, on the device."""
    weights: PackedExperts
    rows: int
    linear_beta: float
    tiles: TileSet

    @staticmethod
    def of(x: Tensor, counts: Tensor, weights: PackedExperts, linear_beta: float) -> "Groups":
        tiles = choose_tiles(x.shape[0], weights.num_experts)
        return Groups(counts.to(x.device), weights, x.shape[0], linear_beta, tiles)


@dataclass(frozen=True, slots=True)
class LowRank:
    """One more step of a product: the rows' projection times a bfloat16 factor."""

    rows: Tensor
    """`[N, 32]` or `[N, 64]`."""
    factor: Tensor
    """`[E or 1, M, 32]`; `[1, L, 64]` in the gate's backward."""
    second: Tensor | None = None
    """The up-projection's factor in the gate product; it meets columns 32-63 of `rows`."""


def gate(g: Groups, x: Tensor, low_rank: LowRank | None, h: Tensor, pre: Tensor | None) -> None:
    """h `[N, F]` = SiTU-GLU(w1 x, w3 x); also pre `[N, 2F]` = w1 x | w3 x when given."""
    w = g.weights
    weights = _weight_map(w.w1_packed, 32, 128, _SWIZZLE_32), _weight_map(w.w3_packed, 32, 128, _SWIZZLE_32)
    _launch(g, "experts_gate", x, weights, (w.w1_scale, w.w3_scale), low_rank, h, extra=pre)


def down(g: Groups, h: Tensor, low_rank: LowRank | None, y: Tensor) -> None:
    """y `[N, L]` = w2 h."""
    weight = _weight_map(g.weights.w2_packed, 32, 128, _SWIZZLE_32)
    _launch(g, "experts_down", h, (weight, weight), (g.weights.w2_scale, g.weights.w2_scale), low_rank, y)


def down_backward(g: Groups, dy: Tensor, low_rank: LowRank | None, pre: Tensor, dpre: Tensor, h: Tensor | None) -> None:
    """dpre `[N, 2F]` from dy `[N, L]` through w2 and the activation at pre; also h `[N, F]` when given."""
    weight = _weight_map(g.weights.w2_packed, 128, 64, _SWIZZLE_128)
    scale = g.weights.w2_scale
    _launch(g, "experts_down_backward", dy, (weight, weight), (scale, scale), low_rank, dpre, extra=h, pre=pre)


def gate_backward(g: Groups, dpre: Tensor, low_rank: LowRank | None, dx: Tensor) -> None:
    """dx `[N, L]` from dpre `[N, 2F]` through w1 and w3."""
    w = g.weights
    weights = _weight_map(w.w1_packed, 128, 64, _SWIZZLE_128), _weight_map(w.w3_packed, 128, 64, _SWIZZLE_128)
    _launch(g, "experts_gate_backward", dpre, weights, (w.w1_scale, w.w3_scale), low_rank, dx)


def _launch(
    g: Groups,
    entry: str,
    rows: Tensor,
    weights: tuple[ctypes.Array, ctypes.Array],
    scales: tuple[Tensor, Tensor],
    low_rank: LowRank | None,
    out: Tensor,
    *,
    extra: Tensor | None = None,
    pre: Tensor | None = None,
) -> None:
    params = _Params(
        counts=g.counts.data_ptr(),
        scale0=scales[0].data_ptr(),
        scale1=scales[1].data_ptr(),
        lora0=low_rank.factor.data_ptr() if low_rank else None,
        lora1=low_rank.second.data_ptr() if low_rank and low_rank.second is not None else None,
        pre_in=pre.data_ptr() if pre is not None else None,
        out=out.data_ptr(),
        extra=extra.data_ptr() if extra is not None else None,
        rows=g.rows,
        experts=g.weights.num_experts,
        latent=g.weights.latent,
        ffn=g.weights.ffn,
        lora_stride=0 if low_rank is None or low_rank.factor.shape[0] == 1 else low_rank.factor[0].numel(),
        linear_beta=g.linear_beta,
    )
    rows_map = _tensor_map(rows, _BFLOAT16, (64, 32), _SWIZZLE_128, _PROMOTE_256)
    low_map = (
        rows_map if low_rank is None else _tensor_map(low_rank.rows, _BFLOAT16, (64, 32), _SWIZZLE_128, _PROMOTE_128)
    )
    arguments = (rows_map, *weights, low_map, params)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    device = rows.device.index
    function = kernel_function(g.tiles, entry, device)
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    blocks = _multiprocessors(device)
    shared = g.tiles.shared_bytes
    status = driver().cuLaunchKernel(
        function, blocks, 1, 1, g.tiles.threads, 1, 1, shared, ctypes.c_void_p(stream), pointers, None
    )
    check_driver(status)


@cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _weight_map(packed: Tensor, columns: int, rows: int, swizzle: int) -> ctypes.Array:
    return _tensor_map(packed.view(-1, packed.shape[-1]), _UINT8, (columns, rows), swizzle, _PROMOTE_256)


def _tensor_map(matrix: Tensor, kind: int, box: tuple[int, int], swizzle: int, promotion: int) -> ctypes.Array:
    """A CUtensorMap of a contiguous `[rows, columns]` matrix, in 128 bytes aligned to 64; reads past it give zeros."""
    rows, columns = matrix.shape
    storage = (ctypes.c_uint64 * 24)()
    offset = -ctypes.addressof(storage) % 64
    tensor_map = (ctypes.c_uint64 * 16).from_buffer(storage, offset)
    dims = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(columns * matrix.element_size())
    boxes, steps = (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1)
    pointer = ctypes.c_void_p(matrix.data_ptr())
    encode = driver().cuTensorMapEncodeTiled
    check_driver(encode(tensor_map, kind, 2, pointer, dims, strides, boxes, steps, 0, swizzle, promotion, 0))
    return tensor_map
