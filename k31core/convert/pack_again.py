"""MXFP4 codes from BF16 values and the scales they were decoded with: the inverse of the conversion, twice.

`pack_with_scale` is the readable one, in fp64. `pack_bf16` gives the same codes from the bits of BF16, many times
faster: a scale byte is a BF16 exponent, so a magnitude is on the grid exactly when the difference of the two is one of
seven.
"""

import torch
from torch import Tensor

from k31core.convert.source import ConvertError

_BLOCK = 32
_CHUNK = 1 << 16
"""Elements worked on at a time, so that the steps between stay in the cache."""
_FIRST_NORMAL = 2
"""Scale bytes below it give subnormal BF16 values, which have no exponent to compare."""
_OFF_GRID = "a value is not on the E2M1 grid of its scale"


def pack_with_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """Packed codes u8 `[..., in/2]` of `weight` `[..., in]` under given scale bytes u8 `[..., in/32]`.

    Raises ConvertError when a value is not one of the sixteen that the scale allows. A negative zero keeps its sign.
    """
    exponent = 127 - scale.int()
    unit = torch.ldexp(weight.double().view(*scale.shape, _BLOCK), exponent.unsqueeze(-1))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    code = torch.searchsorted(magnitudes, unit.abs())
    if not bool((magnitudes[code.clamp(max=7)] == unit.abs()).all()):
        raise ConvertError(_OFF_GRID)
    code = (code + 8 * unit.signbit()).to(torch.uint8).view(*weight.shape[:-1], -1, 2)
    return code[..., 0] | (code[..., 1] << 4)


def pack_bf16(weight: Tensor, scale: Tensor) -> Tensor:
    """`pack_with_scale` of a contiguous bfloat16 `weight`; the same codes, the same ConvertError."""
    if weight.dtype != torch.bfloat16:
        raise ConvertError(f"packing again takes bfloat16, got {weight.dtype}")
    blocks = weight.contiguous().view(torch.int16).view(-1, _BLOCK)
    scales = scale.reshape(-1, 1)
    packed = torch.empty(blocks.shape[0], _BLOCK // 2, dtype=torch.uint8)
    step = _CHUNK // _BLOCK
    for start in range(0, blocks.shape[0], step):
        rows = slice(start, start + step)
        if bool((scales[rows] < _FIRST_NORMAL).any()):
            values = blocks[rows].view(torch.bfloat16)
            packed[rows] = pack_with_scale(values, scales[rows])
        else:
            packed[rows] = _pack_bits(blocks[rows], scales[rows])
    return packed.view(*weight.shape[:-1], weight.shape[-1] // 2)


def _pack_bits(bits: Tensor, scale: Tensor) -> Tensor:
    """int16 bits `[n, 32]` of BF16 values, scale u8 `[n, 1]` -> codes u8 `[n, 16]`.

    BF16 is sign, 8 bits of exponent, 7 of mantissa. Above the scale's exponent, counted in half powers of two (the
    upper mantissa bit), the magnitudes 0.5, 1, 1.5, 2, 3, 4, 6 are -2, 0, 1, 2, 3, 4, 5; in units of 1/64 of that:
    -128, 0, 64, ... 320. Everything else is off the grid.
    """
    magnitude = bits & 0x7FFF
    zero = magnitude == 0
    above = magnitude.sub_(scale.to(torch.int16) << 7).masked_fill_(zero, 0)
    off = ((above & 63) != 0).logical_or_(above > 320).logical_or_(above < -128).logical_or_(above == -64)
    if bool(off.any()):
        raise ConvertError(_OFF_GRID)
    code = above.bitwise_right_shift_(6).add_(2).clamp_(min=1).masked_fill_(zero, 0)
    code |= (bits >> 12) & 8
    pairs = code.view(torch.int32)  # the even input is the lower half
    return (pairs | (pairs >> 12)).to(torch.uint8)
