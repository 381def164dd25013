"""The inverse of the BF16 conversion: every expert packed again from its BF16 values, compared byte for byte."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from k31core.checkpoint.native import NativeCheckpoint
from k31core.checkpoint.tensor_file import TensorFile
from k31core.convert.mxfp4_to_bf16 import scale_of
from k31core.convert.source import PACKED, SCALE, WEIGHT, ConvertError, open_mxfp4, read_config

_BLOCK = 32


def pack_with_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """Packed codes u8 `[..., in/2]` of `weight` `[..., in]` under given scale bytes u8 `[..., in/32]`.

    Raises ConvertError when a value is not one of the sixteen that the scale allows. A negative zero keeps its sign.
    """
    exponent = 127 - scale.int()
    unit = torch.ldexp(weight.double().view(*scale.shape, _BLOCK), exponent.unsqueeze(-1))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    code = torch.searchsorted(magnitudes, unit.abs())
    if not bool((magnitudes[code.clamp(max=7)] == unit.abs()).all()):
        raise ConvertError("a value is not on the E2M1 grid of its scale")
    code = (code + 8 * unit.signbit()).to(torch.uint8).view(*weight.shape[:-1], -1, 2)
    return code[..., 0] | (code[..., 1] << 4)


def verify_bf16(
    model_dir: Path, bf16_dir: Path, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, int]:
    """Prove that `bf16_dir` holds exactly the values of `model_dir`; returns counts of tensors compared.

    Raises ConvertError naming the first tensor that is missing or differs.
    """
    _, source = open_mxfp4(model_dir)
    read_config(bf16_dir)
    result = NativeCheckpoint(bf16_dir)
    experts = carried = 0
    shards = sorted(set(source.shard_of.values()))
    for number, shard in enumerate(shards):
        if progress is not None:
            progress(number, len(shards))
        scales: dict[str, TensorFile] = {}
        with TensorFile(model_dir / shard) as before, TensorFile(bf16_dir / shard) as after:
            for name, entry in before.entries.items():
                if name.endswith(SCALE):
                    continue
                target = name.removesuffix(PACKED) + WEIGHT if name.endswith(PACKED) else name
                if target not in after.entries or result.shard_of.get(target) != shard:
                    raise ConvertError(f"{bf16_dir / shard}: tensor {target} is missing")
                found = after.read(target)
                if name.endswith(PACKED):
                    _check_expert(before.read(name), scale_of(source, before, scales, name), found, target)
                    experts += 1
                else:
                    if found.dtype != entry.dtype or not _same_bytes(before.read(name), found):
                        raise ConvertError(f"{bf16_dir / shard}: tensor {target} differs from the source")
                    carried += 1
        for opened in scales.values():
            opened.close()
    if progress is not None:
        progress(len(shards), len(shards))
    extra = len(result.shard_of) - experts - carried
    if extra:
        raise ConvertError(f"{bf16_dir}: {extra} tensors are in the result and not in the source")
    return {"experts": experts, "carried": carried}


def _check_expert(packed: Tensor, scale: Tensor, weight: Tensor, name: str) -> None:
    if weight.dtype != torch.bfloat16 or weight.shape[-1] != 2 * packed.shape[-1]:
        raise ConvertError(f"{name} has {weight.dtype} {list(weight.shape)}, expected bfloat16 of the decoded shape")
    try:
        again = pack_with_scale(weight, scale)
    except ConvertError as error:
        raise ConvertError(f"{name}: {error}") from error
    if not torch.equal(again, packed):
        where = tuple((again != packed).nonzero()[0].tolist())
        raise ConvertError(
            f"{name}: packed again, byte {where} is {int(again[where])}, the source has {int(packed[where])}"
        )


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
