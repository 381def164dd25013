"""The inverse check: it packs every expert again, proves equality, and names whatever differs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.native import INDEX
from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
from k31core.convert.pack_again import pack_bf16, pack_with_scale
from k31core.convert.source import ConvertError
from k31core.convert.verify_bf16 import verify_bf16
from tests.unit.convert.sources import change_byte, mxfp4_copy, shard_of

EXPERT = "language_model.model.layers.5.block_sparse_moe.experts.3.w2.weight"
CARRIED = "vision_tower.blocks.0.weight"
_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    source = mxfp4_copy(tmp_path_factory.mktemp("verify"))
    convert_to_bf16(source, source.parent / "bf16", workers=1)
    return source, source.parent / "bf16"


def copy_of(directory: Path, target: Path) -> Path:
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_conversion_is_proved(pair: tuple[Path, Path]) -> None:
    seen: list[tuple[int, int]] = []
    counts = verify_bf16(*pair, workers=1, progress=lambda done, total: seen.append((done, total)))
    index = json.loads((pair[1] / INDEX).read_text())["weight_map"]
    assert counts == {"experts": 6 * 8 * 3, "carried": len(index) - 6 * 8 * 3}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 4 and 0.8 < seen[-1][0] / seen[-1][1] <= 1


@pytest.mark.parametrize("name", [EXPERT, CARRIED])
def test_one_changed_byte_is_named(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    changed = copy_of(pair[1], tmp_path / "bf16")
    path = shard_of(changed, name)
    first = load_file(path)[name].contiguous().view(-1).view(torch.uint8)[0]
    change_byte(path, name, int(first) ^ 0x80)
    with pytest.raises(ConvertError, match=name.replace(".", r"\.")):
        verify_bf16(pair[0], changed, workers=1)


def test_another_sign_of_zero_is_a_difference(pair: tuple[Path, Path], tmp_path: Path) -> None:
    changed = copy_of(pair[1], tmp_path / "bf16")
    path = shard_of(changed, EXPERT)
    tensors = load_file(path)
    at = tuple((tensors[EXPERT] == 0).nonzero()[0].tolist())
    tensors[EXPERT][at] = -tensors[EXPERT][at]
    save_file(tensors, path)
    with pytest.raises(ConvertError, match="packed again"):
        verify_bf16(pair[0], changed, workers=1)


def test_a_tensor_too_few_or_too_many_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    changed = copy_of(pair[1], tmp_path / "bf16")
    index = json.loads((changed / INDEX).read_text())
    shard = index["weight_map"].pop(CARRIED)
    (changed / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConvertError, match=rf"{CARRIED} is missing"):
        verify_bf16(pair[0], changed, workers=1)
    index["weight_map"].update({CARRIED: shard, "extra.weight": shard})
    (changed / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConvertError, match=r"1 tensors are in the result and not in the source: extra\.weight"):
        verify_bf16(pair[0], changed, workers=1)


def decoded(scale_byte: int) -> torch.Tensor:
    """Every byte's two values under a scale, as a plain list of the format's magnitudes: fp64 `[16, 32]`."""
    codes = [code for byte in range(256) for code in (byte & 15, byte >> 4)]
    values = [(-1 if code & 8 else 1) * _GRID[code & 7] * 2.0 ** (scale_byte - 127) for code in codes]
    return torch.tensor(values, dtype=torch.float64).view(16, 32)


@pytest.mark.parametrize("pack", [pack_with_scale, pack_bf16])
def test_every_code_under_every_scale(pack) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for byte in range(253):  # 253 and 254 leave BF16's range, 255 is NaN
        weight = decoded(byte).bfloat16()
        assert torch.equal(weight.double(), decoded(byte))
        assert torch.equal(pack(weight, torch.full((16, 1), byte, dtype=torch.uint8)), expected), byte


def test_both_refuse_exactly_the_values_off_the_grid() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for byte in (2, 3, 100, 127, 200, 252):
        scale = torch.full((1, 1), byte, dtype=torch.uint8)
        grid = set(decoded(byte).flatten().tolist())
        on = torch.tensor([value in grid for value in every.tolist()])
        block = torch.zeros(1, 32, dtype=torch.bfloat16)
        assert int(on.sum()) == 16
        for value in every[on]:
            block[0, 7] = value
            assert torch.equal(pack_bf16(block, scale), pack_with_scale(block, scale))
        wrong = every[~on]
        for value in wrong[torch.randperm(len(wrong), generator=torch.Generator().manual_seed(byte))[:200]]:
            block[0, 7] = value
            for pack in (pack_bf16, pack_with_scale):
                with pytest.raises(ConvertError, match="grid"):
                    pack(block, scale)


def test_the_near_misses_of_the_grid_are_refused() -> None:
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    for value in (0.25, 0.75, 0.625, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 8.0, 2.0**-126, 2.0**-133):
        block = torch.zeros(1, 32, dtype=torch.bfloat16)
        block[0, 0] = value
        assert float(block[0, 0]) == value
        with pytest.raises(ConvertError, match="grid"):
            pack_bf16(block, scale)
