"""Export to PEFT's layout and back: the same bytes, PEFT's names, and refusals by tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.adapter import AdapterError
from k31core.checkpoint.peft import INDEX_FILE, export_peft, import_peft, logical_name

CASE = Path(__file__).parents[2] / "cases" / "model" / "tiny-k31-adapter"
ORIGINAL = CASE / "adapter_model.safetensors"


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (30_000, 3)])
def test_round_trip_is_the_same_bytes(tmp_path: Path, shard_bytes: int, files: int) -> None:
    written = export_peft(CASE, tmp_path / "peft", shard_bytes=shard_bytes)
    assert len(written) >= files and (len(written) == 1) == (files == 1)
    assert (tmp_path / "peft" / INDEX_FILE).exists() == (files > 1)
    import_peft(tmp_path / "peft", tmp_path / "back")
    before, after = load_file(ORIGINAL), load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["r"] == 4


def test_names_and_shapes_are_sglangs(tmp_path: Path) -> None:
    export_peft(CASE, tmp_path / "peft")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    stem = "base_model.model.language_model.model.layers.1.mlp.experts"
    assert tensors[f"{stem}.w1.lora_A.weight"].shape == (1, 4, 32)
    assert tensors[f"{stem}.w2.lora_A.weight"].shape == (8, 4, 32)
    assert "base_model.model.language_model.model.layers.1.mlp.shared_experts.up_proj.lora_B.weight" in tensors
    modules = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"]
    assert modules == ["down_proj", "gate_proj", "kv_a_proj_with_mqa", "o_proj", "q_a_proj", "up_proj"]


def test_names_without_the_language_model_prefix_and_with_projection_names_are_understood() -> None:
    name = "base_model.model.model.layers.3.mlp.experts.down_proj.lora_B.weight"
    assert logical_name(name) == "language_model.model.layers.3.block_sparse_moe.experts.w2.lora_B.weight"
    dense = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert logical_name(dense) == "language_model.model.layers.0.mlp.down_proj.lora_A.weight"


def test_a_strange_tensor_and_a_missing_partner_are_named(tmp_path: Path) -> None:
    export_peft(CASE, tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("o_proj.lora_B.weight"))
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(AdapterError, match=r"o_proj\.lora_A\.weight has no partner"):
        import_peft(tmp_path / "peft", tmp_path / "back")
    save_file({**tensors, "base_model.model.model.embed_tokens.weight": torch.zeros(2)}, path)
    with pytest.raises(AdapterError, match="embed_tokens"):
        import_peft(tmp_path / "peft", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_two_names_for_one_factor(tmp_path: Path) -> None:
    export_peft(CASE, tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.w1." in name)
    save_file({**tensors, name.replace(".w1.", ".gate_proj."): tensors[name].clone()}, path)
    with pytest.raises(AdapterError, match="both mean"):
        import_peft(tmp_path / "peft", tmp_path / "back")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    shutil.copytree(CASE, tmp_path / "there")
    with pytest.raises(AdapterError, match="not empty"):
        export_peft(CASE, tmp_path / "there")
