"""The BF16 conversion: exact against an independent decoder, resumable, provable, and careful about its directories."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from k31core.checkpoint.native import INDEX
from k31core.convert import mxfp4_to_bf16
from k31core.convert.mxfp4_to_bf16 import convert_shard, convert_to_bf16
from k31core.convert.source import ConvertError
from k31core.convert.verify_bf16 import pack_with_scale, verify_bf16

CASE = Path(__file__).parents[2] / "cases" / "model" / "tiny-k31"
_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _source(tmp_path: Path) -> Path:
    source = tmp_path / "mxfp4"
    shutil.copytree(CASE, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    return source


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
    source = _source(tmp_path)
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
    source = _source(tmp_path)
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


def test_interrupted_conversion_keeps_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = _source(tmp_path), tmp_path / "bf16"
    calls: list[str] = []

    def counting(model_dir: Path, save_dir: Path, shard: str) -> mxfp4_to_bf16.ShardRecord:
        if calls:
            raise KeyboardInterrupt
        calls.append(shard)
        return convert_shard(model_dir, save_dir, shard)

    with monkeypatch.context() as patch:
        patch.setattr(mxfp4_to_bf16, "convert_shard", counting)
        with pytest.raises(KeyboardInterrupt):
            convert_to_bf16(source, target, workers=1)
    assert not (target / INDEX).exists()
    first = (target / calls[0]).stat().st_mtime_ns
    convert_to_bf16(source, target, workers=1)
    assert (target / calls[0]).stat().st_mtime_ns == first
    assert verify_bf16(source, target)["experts"] == 144


def test_two_processes_write_the_same_bytes_as_one(tmp_path: Path) -> None:
    source = _source(tmp_path)
    one = convert_to_bf16(source, tmp_path / "one", workers=1)
    two = convert_to_bf16(source, tmp_path / "two", workers=2)
    assert one == two


def test_verify_names_a_flipped_weight(tmp_path: Path) -> None:
    source, target = _source(tmp_path), tmp_path / "bf16"
    convert_to_bf16(source, target, workers=1)
    shard = next(target.glob("*00002*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 0x80
    shard.write_bytes(data)
    with pytest.raises(ConvertError, match=r"language_model\.model\.layers\.\d+"):
        verify_bf16(source, target)


def test_packing_again_keeps_negative_zero_and_every_code() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for byte in (1, 100, 127, 200, 252):
        scale = torch.full((16, 1), byte, dtype=torch.uint8)
        weight = _decode_slowly(packed, scale)
        # The slow decoder multiplies -1 by 0.0, which is a negative zero as the format has it.
        assert torch.equal(pack_with_scale(weight, scale), packed)


def test_pack_refuses_a_value_off_the_grid() -> None:
    with pytest.raises(ConvertError, match="grid"):
        pack_with_scale(torch.full((1, 32), 0.7, dtype=torch.bfloat16), torch.full((1, 1), 127, dtype=torch.uint8))


def test_wrong_directories_are_refused(tmp_path: Path) -> None:
    source = _source(tmp_path)
    with pytest.raises(ConvertError, match="contain one another"):
        convert_to_bf16(source, source / "inside")
    convert_to_bf16(source, tmp_path / "bf16", workers=1)
    with pytest.raises(ConvertError, match="is a BF16 checkpoint"):
        convert_to_bf16(tmp_path / "bf16", tmp_path / "again")
    (tmp_path / "bf16" / INDEX).unlink()
    with pytest.raises(ConvertError, match="half-converted"):
        convert_to_bf16(tmp_path / "bf16", tmp_path / "again")


def test_a_shard_of_another_source_is_refused(tmp_path: Path) -> None:
    source, target = _source(tmp_path), tmp_path / "bf16"
    (target / ".converted").mkdir(parents=True)
    convert_shard(source, target, "model-00001-of-00002.safetensors")
    other = source / "model-00001-of-00002.safetensors"
    other.write_bytes(other.read_bytes().replace(b"lm_head", b"lm_hepd"))
    with pytest.raises(ConvertError, match="another model-00001"):
        convert_to_bf16(source, target, workers=1)


def test_nan_scale_is_refused_by_name(tmp_path: Path) -> None:
    source = _source(tmp_path)
    shard = source / "model-00002-of-00002.safetensors"
    with safe_open(shard, "pt") as file:
        name = next(n for n in file.keys() if n.endswith("weight_scale"))  # noqa: SIM118
    data = bytearray(shard.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[8 + length + start] = 255
    shard.write_bytes(data)
    with pytest.raises(ConvertError, match=name.removesuffix("_scale").replace(".", r"\.")):
        convert_to_bf16(source, tmp_path / "bf16", workers=1)
