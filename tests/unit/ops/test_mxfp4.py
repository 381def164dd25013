"""MXFP4 against a slow decoder written from the format's text, and against compressed-tensors."""

import math

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

from k31core.ops.mxfp4 import MxFp4Error, check_scale, decode, encode


def slow_value(byte: int, high: bool, scale: int) -> float:
    """One value from the bits: sign, two exponent bits (bias 1), one mantissa bit, as Python integers."""
    code = byte >> 4 if high else byte & 15
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return math.copysign(math.ldexp(magnitude, scale - 127), -1.0 if code & 8 else 1.0)


def every_byte_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """packed `[255, 256]` and scale `[255, 16]`: each row holds every byte under one scale."""
    packed = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous()
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1).expand(255, 16).contiguous()
    return packed, scale


def slow_table() -> torch.Tensor:
    rows = [[slow_value(byte, high, scale) for byte in range(256) for high in (False, True)] for scale in range(255)]
    return torch.tensor(rows, dtype=torch.float64)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a == b).all()) and bool((a.signbit() == b.signbit()).all())


def test_every_byte_and_scale_in_float64() -> None:
    packed, scale = every_byte_and_scale()
    assert same_bits(decode(packed, scale, torch.float64), slow_table())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_and_scale_that_fits_is_exact(dtype: torch.dtype) -> None:
    packed, scale = every_byte_and_scale()
    expected = slow_table()
    assert same_bits(decode(packed[:253], scale[:253], dtype).double(), expected[:253])
    for byte in (253, 254):
        fits = [b for b in range(256) if all(abs(slow_value(b, h, byte)) < 2.0**128 for h in (False, True))]
        row = torch.tensor(fits * 16, dtype=torch.uint8)[: len(fits) // 16 * 16]
        values = torch.tensor([[slow_value(int(b), h, byte) for b in row for h in (False, True)]], dtype=torch.float64)
        scales = torch.full((1, row.numel() // 16), byte, dtype=torch.uint8)
        assert same_bits(decode(row.unsqueeze(0), scales, dtype).double(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("byte", "code"), [(254, 4), (253, 6), (254, 15)])
def test_a_value_above_the_range_is_refused(dtype: torch.dtype, byte: int, code: int) -> None:
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[1, 20] = code
    scale = torch.full((2, 2), 127, dtype=torch.uint8)
    scale[1, 1] = byte
    with pytest.raises(MxFp4Error, match=rf"\(1, 40\) with scale byte {byte}"):
        decode(packed, scale, dtype)


def test_compressed_tensors_agrees() -> None:
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (64, 128), dtype=torch.uint8, generator=generator)
    scale = torch.randint(20, 240, (64, 8), dtype=torch.uint8, generator=generator)
    values = unpack_fp4_from_uint8(packed, 64, 256, dtype=torch.bfloat16)
    oracle = values * decompress_mx_scale(scale).repeat_interleave(32, dim=1)
    assert same_bits(decode(packed, scale, torch.bfloat16), oracle)


def test_compressed_tensors_agrees_on_every_byte_and_scale() -> None:
    packed, scale = every_byte_and_scale()
    values = unpack_fp4_from_uint8(packed, 255, 512, dtype=torch.float64)
    oracle = values * torch.ldexp(torch.ones(255, 16, dtype=torch.float64), scale.int() - 127).repeat_interleave(
        32, dim=1
    )
    assert same_bits(decode(packed, scale, torch.float64), oracle)


def test_nan_scale_is_refused_by_name() -> None:
    scale = torch.full((4, 2), 120, dtype=torch.uint8)
    check_scale(scale, "w1.weight_scale")
    scale[2, 1] = 255
    with pytest.raises(ValueError, match=r"w1\.weight_scale: scale byte 255 \(NaN\) at index \(2, 1\)"):
        check_scale(scale, "w1.weight_scale")
    with pytest.raises(MxFp4Error, match="255"):
        decode(torch.zeros(4, 32, dtype=torch.uint8), scale)


def test_shapes_and_dtypes_are_checked() -> None:
    packed, scale = torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(MxFp4Error, match="do not belong together"):
        decode(packed, scale[:, :1])
    with pytest.raises(MxFp4Error, match="float16"):
        decode(packed, scale, torch.float16)
    with pytest.raises(MxFp4Error, match="uint8"):
        decode(packed.int(), scale)


def nearest_even(value: float) -> float:
    """The nearest grid value by exhaustive comparison; a tie goes to the even code."""
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    best = min(range(8), key=lambda code: (abs(grid[code] - abs(value)), code % 2))
    return math.copysign(grid[best], value)


def test_encode_is_nearest_even_under_the_stated_scale() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(16, 96, dtype=torch.float64, generator=generator) * torch.logspace(-12, 12, 16).unsqueeze(1)
    weight[0, :10] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.25, 4.0], dtype=torch.float64)
    weight[0, 10:32] = 0
    packed, scale = encode(weight)
    decoded = decode(packed, scale, torch.float64)
    for row in range(16):
        for block in range(3):
            values = weight[row, block * 32 : block * 32 + 32]
            step = 2.0 ** (math.floor(math.log2(float(values.abs().max()))) - 2)
            assert float(scale[row, block]) - 127 == math.log2(step)
            expected = [nearest_even(float(v) / step) * step for v in values]
            assert decoded[row, block * 32 : block * 32 + 32].tolist() == expected


def test_encode_of_decoded_weights_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(7)
    packed = torch.randint(0, 256, (32, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 253, (32, 4), dtype=torch.uint8, generator=generator)
    for dtype in (torch.bfloat16, torch.float64):
        weight = decode(packed, scale, dtype)
        assert same_bits(decode(*encode(weight), dtype), weight)


def test_encode_edges() -> None:
    packed, scale = encode(torch.zeros(1, 32))
    assert packed.tolist() == [[0] * 16] and scale.tolist() == [[127]]
    tiny = torch.full((1, 32), 2.0**-130, dtype=torch.float64)
    assert encode(tiny)[1].tolist() == [[0]]
    with pytest.raises(MxFp4Error, match=r"\(0, 3\) is inf"):
        encode(torch.tensor([[0.0, 0, 0, math.inf] + [0.0] * 28]))
    with pytest.raises(MxFp4Error, match="multiple of 32"):
        encode(torch.zeros(2, 33))
