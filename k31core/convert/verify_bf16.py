"""The inverse of the BF16 conversion, over all cores: every expert packed again from its BF16 values, compared byte
for byte; everything else compared as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from k31core.checkpoint.tensor_file import TensorFile
from k31core.convert.mxfp4_to_bf16 import pieces, read_scale, scales_elsewhere
from k31core.convert.pack_again import pack_bf16
from k31core.convert.shard_pool import default_workers, over_shards
from k31core.convert.source import PACKED, SCALE, WEIGHT, ConvertError, open_bf16, open_mxfp4


@dataclass(frozen=True, slots=True)
class Compared:
    """What one shard's comparison covered."""

    experts: int
    """Weights packed again."""
    carried: int
    """Tensors compared as they are."""
    nbytes: int
    """Bytes of the result that were read."""


def verify_bf16(
    model_dir: Path,
    bf16_dir: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Prove that `bf16_dir` holds exactly the values of `model_dir`; returns counts of tensors compared.

    `progress(done, total)` is called in bytes of the result. Raises ConvertError naming the first tensor found missing
    or different.
    """
    _, source = open_mxfp4(model_dir)
    _, result = open_bf16(bf16_dir)
    shards = sorted(set(source.shard_of.values()))
    expected = {_target(name): shard for name, shard in source.shard_of.items() if not name.endswith(SCALE)}
    for name, shard in expected.items():
        if result.shard_of.get(name) != shard:
            raise ConvertError(f"{bf16_dir / shard}: tensor {name} is missing")
    extra = sorted(result.shard_of.keys() - expected.keys())
    if extra:
        raise ConvertError(f"{bf16_dir}: {len(extra)} tensors are in the result and not in the source: {extra[0]}")
    total = sum((bf16_dir / shard).stat().st_size for shard in shards)
    done = experts = carried = 0
    if progress is not None:
        progress(0, total)
    work = partial(verify_shard, model_dir, bf16_dir, elsewhere=scales_elsewhere(source))
    for compared in over_shards(work, shards, workers or default_workers(total)):
        done += compared.nbytes
        experts += compared.experts
        carried += compared.carried
        if progress is not None:
            progress(done, total)
    return {"experts": experts, "carried": carried}


def verify_shard(model_dir: Path, bf16_dir: Path, shard: str, *, elsewhere: Mapping[str, str]) -> Compared:
    """Compare one shard; at most one expert weight or two pieces are in memory."""
    scales: dict[str, TensorFile] = {}
    experts = carried = nbytes = 0
    try:
        with TensorFile(model_dir / shard) as before, TensorFile(bf16_dir / shard) as after:
            for name, entry in before.entries.items():
                if name.endswith(SCALE):
                    continue
                target = _target(name)
                if target not in after.entries:
                    raise ConvertError(f"{bf16_dir / shard}: tensor {target} is missing")
                if name.endswith(PACKED):
                    weight = after.read(target)
                    _check_expert(before.read(name), read_scale(before, name, elsewhere, scales), weight, target)
                    experts += 1
                else:
                    found = after.entries[target]
                    if (found.dtype, found.shape) != (entry.dtype, entry.shape) or not _same_bytes(before, after, name):
                        raise ConvertError(f"{bf16_dir / shard}: tensor {target} differs from the source")
                    carried += 1
                nbytes += after.entries[target].nbytes
    finally:
        for opened in scales.values():
            opened.close()
    return Compared(experts, carried, nbytes)


def _target(name: str) -> str:
    return name.removesuffix(PACKED) + WEIGHT if name.endswith(PACKED) else name


def _check_expert(packed: Tensor, scale: Tensor, weight: Tensor, name: str) -> None:
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    if weight.dtype != torch.bfloat16 or weight.shape != shape:
        raise ConvertError(f"{name} is {weight.dtype} {list(weight.shape)}, expected bfloat16 {list(shape)}")
    try:
        again = pack_bf16(weight, scale)
    except ConvertError as error:
        raise ConvertError(f"{name}: {error}") from error
    if not torch.equal(again, packed):
        where = tuple((again != packed).nonzero()[0].tolist())
        raise ConvertError(
            f"{name}: packed again, byte {where} is {int(again[where])}, the source has {int(packed[where])}"
        )


def _same_bytes(a: TensorFile, b: TensorFile, name: str) -> bool:
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in zip(pieces(a, name), pieces(b, name), strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
