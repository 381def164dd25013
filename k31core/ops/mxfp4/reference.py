"""MXFP4 decode and encode in plain torch.

Layout (OCP Microscaling formats v1.0, compressed-tensors `mxfp4-pack-quantized`): a weight `[..., in]` is stored as
`packed` u8 `[..., in/2]`, the even input in the low nibble, and `scale` u8 `[..., in/32]`. A nibble is E2M1: bit 3 is
the sign, bits 0-2 choose the magnitude 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A scale byte b is 2^(b - 127); b = 255 is NaN and
is refused.
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
"""Consecutive input elements that share one scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_NAN_BYTE = 255
_FIRST_RISKY_BYTE = 253
"""From 2^126 on, the larger magnitudes (4, 6, then 2, 3) leave the exponent range of bfloat16 and float32."""


class MxFp4Error(ValueError):
    """A packed weight or a value that MXFP4 cannot represent: names the tensor, the byte or value, and where it is."""


def check_scale(scale: Tensor, name: str) -> None:
    """Raise `MxFp4Error` naming the tensor and the first position when a scale byte is 255 (NaN)."""
    if scale.dtype != torch.uint8:
        raise MxFp4Error(f"{name}: scale bytes must be uint8, got {scale.dtype}")
    bad = scale == _NAN_BYTE
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise MxFp4Error(
            f"{name}: scale byte 255 (NaN) at index {where} and {int(bad.sum()) - 1} more; the checkpoint is damaged "
            "or is not MXFP4: download the shard again"
        )


def scale_of_byte(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(byte - 127) for each byte, exact in `dtype`; 255 becomes NaN (callers refuse it first)."""
    return _power_table(dtype, scale.device)[scale.int()]


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Exact weights `[..., in]` from `packed` u8 `[..., in/2]` and `scale` u8 `[..., in/32]`.

    Small scales give subnormals of `dtype`, which are exact too. Raises `MxFp4Error` for mismatched shapes, a scale
    byte of 255, and a value whose exponent is above the range of `dtype` (only scale bytes 253 and 254; none in
    float64).
    """
    _check_layout(packed, scale, dtype)
    check_scale(scale, "scale")
    weight = decode_unchecked(packed, scale, dtype)
    if dtype != torch.float64 and bool((scale >= _FIRST_RISKY_BYTE).any()) and not bool(weight.isfinite().all()):
        where = tuple((~weight.isfinite()).nonzero()[0].tolist())
        byte = int(scale[(*where[:-1], where[-1] // BLOCK)])
        raise MxFp4Error(f"weight at index {where} with scale byte {byte} does not fit {dtype}: decode it to float64")
    return weight


def decode_unchecked(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`decode` for weights that were checked when they were loaded; a byte of 255 gives NaN, an overflow infinity."""
    pairs = _pair_table(dtype, packed.device).index_select(0, packed.reshape(-1).int())
    blocks = pairs.view(*scale.shape, BLOCK)
    return blocks.mul_(scale_of_byte(scale, dtype).unsqueeze(-1)).view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed u8 `[..., in/2]`, scale u8 `[..., in/32]`) of a finite floating weight `[..., in]`.

    Scale rule (OCP): 2^(floor(log2(largest magnitude of the block)) - 2), clamped to bytes 0-254; a block of zeros gets
    2^0. Each value goes to the nearest magnitude, a tie to the even code, and above 6 it saturates to 6. Encoding a
    decoded weight decodes to the same values. Raises `MxFp4Error` for a width that is no multiple of 32 and for NaN or
    infinity.
    """
    if weight.shape[-1] % BLOCK:
        raise MxFp4Error(f"the last dimension must be a multiple of {BLOCK}, got shape {tuple(weight.shape)}")
    if not bool(weight.isfinite().all()):
        where = tuple((~weight.isfinite()).nonzero()[0].tolist())
        raise MxFp4Error(f"weight at index {where} is {float(weight[where])}: MXFP4 holds finite values only")
    blocks = weight.detach().double().reshape(*weight.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(-1)
    # frexp gives m in [0.5, 1), so floor(log2(largest)) is its exponent minus one, without a rounded logarithm.
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0).clamp(-127, 127)
    unit = torch.ldexp(blocks.abs(), -exponent.unsqueeze(-1))
    codes = torch.zeros_like(unit, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(_MAGNITUDES)):
        middle = (low + high) / 2
        codes += (unit >= middle) if code % 2 else (unit > middle)
    codes += blocks.signbit() * torch.tensor(8, dtype=torch.uint8)
    codes = codes.reshape(*weight.shape[:-1], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4), (exponent + 127).to(torch.uint8)


def _check_layout(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise MxFp4Error(f"decode to one of {', '.join(map(str, _DTYPES))}, not {dtype}")
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise MxFp4Error(f"packed and scale must be uint8, got {packed.dtype} and {scale.dtype}")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise MxFp4Error(
            f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together: "
            "expected [..., in/2] and [..., in/32]"
        )


@cache
def _power_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    exponents = torch.arange(256, dtype=torch.int32) - 127
    table = torch.ldexp(torch.ones(256, dtype=torch.float64), exponents)
    table[_NAN_BYTE] = torch.nan
    return table.to(dtype).to(device)


@cache
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    nibbles = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.float64)
    byte = torch.arange(256)
    return torch.stack((nibbles[byte & 15], nibbles[byte >> 4]), dim=-1).to(dtype).to(device)
