"""The BF16 conversion: exact against an independent decoder; index, configuration and vision tensors."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k31core.checkpoint.native import INDEX
from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
from k31core.convert.source import MANIFEST, ConvertError
from tests.unit.convert.sources import CASE, VISION, change_byte, mxfp4_copy, shard_of

_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _read_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def _decode_slowly(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        rows.append([(-1 if c & 8 else 1) * _GRID[c & 7] * 2.0 ** (scales[i // 32] - 127) for i, c in enumerate(codes)])
    return torch.tensor(rows, dtype=torch.float64)


def test_every_weight_is_exact_and_the_rest_is_carried(tmp_path: Path) -> None:
    source = mxfp4_copy(tmp_path)
    manifest = convert_to_bf16(source, tmp_path / "bf16", workers=1)
    before, after = _read_all(source), _read_all(tmp_path / "bf16")
    packed = [name for name in before if name.endswith(".weight_packed")]
    assert manifest["experts"] == len(packed) == 6 * 8 * 3
    for name in packed:
        stem = name.removesuffix("_packed")
        expected = _decode_slowly(before.pop(name), before.pop(f"{stem}_scale"))
        found = after.pop(stem)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.double(), expected)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_index_config_and_side_files(tmp_path: Path) -> None:
    source = mxfp4_copy(tmp_path)
    convert_to_bf16(source, tmp_path / "bf16", workers=1)
    index = json.loads((tmp_path / "bf16" / INDEX).read_text())["weight_map"]
    for shard in set(index.values()):
        with safe_open(tmp_path / "bf16" / shard, "pt") as file:
            assert set(file.keys()) == {name for name, where in index.items() if where == shard}
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    original = json.loads((source / "config.json").read_text())
    del original["text_config"]["quantization_config"]
    assert config == original
    assert (tmp_path / "bf16" / "tokenizer.json").exists()
    assert not (tmp_path / "bf16" / "modeling_evil.py").exists()


def test_vision_tensors_are_carried(tmp_path: Path) -> None:
    source = mxfp4_copy(tmp_path)
    convert_to_bf16(source, tmp_path / "bf16", workers=1)
    before, after = load_file(source / VISION), load_file(tmp_path / "bf16" / VISION)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    index = json.loads((tmp_path / "bf16" / INDEX).read_text())["weight_map"]
    assert index["vision_tower.blocks.0.weight"] == index["mm_projector.bias"] == VISION


def test_a_scale_may_lie_in_another_shard(tmp_path: Path) -> None:
    source = mxfp4_copy(tmp_path)
    index = json.loads((source / INDEX).read_text())
    scales = {name: shard for name, shard in index["weight_map"].items() if name.endswith("weight_scale")}
    moved = {name: load_file(source / shard)[name] for name, shard in scales.items()}
    for shard in sorted(set(scales.values())):
        save_file({n: t for n, t in load_file(source / shard).items() if n not in scales}, source / shard)
    save_file(moved, source / "scales.safetensors")
    index["weight_map"].update(dict.fromkeys(scales, "scales.safetensors"))
    (source / INDEX).write_text(json.dumps(index))
    convert_to_bf16(source, tmp_path / "bf16", workers=1)
    convert_to_bf16(CASE, tmp_path / "plain", workers=1)
    expected, found = _read_all(tmp_path / "plain"), _read_all(tmp_path / "bf16")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_manifest_has_the_digest_of_every_file(tmp_path: Path) -> None:
    manifest = convert_to_bf16(mxfp4_copy(tmp_path), tmp_path / "bf16", workers=1)
    assert json.loads((tmp_path / "bf16" / MANIFEST).read_text()) == manifest
    files = {entry["path"]: entry for entry in manifest["files"]}
    assert files.keys() == {path.name for path in (tmp_path / "bf16").glob("*.safetensors")}
    for path in (tmp_path / "bf16").glob("*.safetensors"):
        assert files[path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert files[path.name]["size"] == path.stat().st_size


def test_nan_scale_is_refused_by_name(tmp_path: Path) -> None:
    source = mxfp4_copy(tmp_path)
    name = "language_model.model.layers.5.block_sparse_moe.experts.3.w2.weight_scale"
    change_byte(shard_of(source, name), name, 255)
    with pytest.raises(ConvertError, match=name.removesuffix("_scale").replace(".", r"\.")):
        convert_to_bf16(source, tmp_path / "bf16", workers=1)
    assert not (tmp_path / "bf16" / INDEX).exists()
