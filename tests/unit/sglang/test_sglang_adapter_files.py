"""Our torch-free reading of an adapter, against the checkpoint package and the model that own its format."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import adapter_slots
from k31core.recipe.train import LoraRecipe
from k31core.rollout.engine import AdapterRefusedError
from k31core.rollout.engines.sglang.adapter_files import (
    check_adapter,
    expected_factors,
    sglang_config,
    sglang_name,
    write_for_sglang,
)
from k31core.rollout.engines.sglang.open import read_text_config

CASES = Path(__file__).parents[2] / "cases" / "model"
MODEL, ADAPTER = CASES / "tiny-k31", CASES / "tiny-k31-adapter"
LORA = LoraRecipe(rank=4, alpha=8)
FACTORS = expected_factors(read_text_config(MODEL), LORA)


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ("o_proj",), ("o_proj", "q_a_proj", "kv_a_proj_with_mqa", "mlp", "experts"), ("shared_experts",)],
    ids=str,
)
def test_expected_factors_are_those_of_the_model(targets: str | tuple[str, ...]) -> None:
    spec = LoraSpec(4, 8.0) if targets == "all-linear" else LoraSpec(4, 8.0, targets=tuple(targets))
    with torch.device("meta"):
        decoder = Decoder(load_config(MODEL), Build(lora=spec, device=torch.device("meta")))
    model = {slot.name: tuple(slot.shard.shape) for slot in adapter_slots(decoder)}
    recipe = LoraRecipe(rank=4, alpha=8, target_modules=targets)
    assert expected_factors(read_text_config(MODEL), recipe) == model


def test_digest_and_values_survive_the_renaming(tmp_path: Path) -> None:
    checked = check_adapter(ADAPTER, FACTORS, LORA)
    assert checked.digest == digest_of_file(ADAPTER / "adapter_model.safetensors")
    write_for_sglang(checked, tmp_path / "out")
    ours, theirs = (load_file(d / "adapter_model.safetensors") for d in (ADAPTER, tmp_path / "out"))
    assert theirs.keys() == {sglang_name(name) for name in ours}
    assert all(torch.equal(theirs[sglang_name(name)], tensor) for name, tensor in ours.items())
    layer = "base_model.model.language_model.model.layers.1.mlp"
    assert theirs[f"{layer}.experts.w1.lora_A.weight"].shape == (1, 4, 32)
    assert f"{layer}.shared_experts.gate_proj.lora_A.weight" in theirs


def test_configuration_for_sglang() -> None:
    config = sglang_config(32, 64.0, FACTORS)
    assert config["target_modules"] == ["down_proj", "gate_proj", "kv_a_proj_with_mqa", "o_proj", "q_a_proj", "up_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 32, 64.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    shutil.copytree(ADAPTER, tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    assert check_adapter(tmp_path / "a", FACTORS, LORA).digest == digest_of_file(path)
    name = "language_model.model.layers.6.block_sparse_moe.experts.w2.lora_B.weight"
    tensors[name][0, 31, 3] = value
    save_file(tensors, path)
    with pytest.raises(AdapterRefusedError, match=rf"{name} holds a value that is nan or infinite"):
        check_adapter(tmp_path / "a", FACTORS, LORA)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _no_header(path: Path) -> None:
    path.write_bytes(b"12345")


def _huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def _no_json(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 4) + b"abcd")


def _half(path: Path) -> None:
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "the adapter is cut off"),
        (_longer, "its header describes"),
        (_no_header, "no safetensors header"),
        (_huge_header, "no safetensors header"),
        (_no_json, "is no safetensors header"),
        (_half, "has dtype F16, expected F32 or BF16"),
        (Path.unlink, "No such file"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: object, message: str) -> None:
    shutil.copytree(ADAPTER, tmp_path / "a")
    damage(tmp_path / "a" / "adapter_model.safetensors")  # type: ignore[operator]
    with pytest.raises(AdapterRefusedError, match=message):
        check_adapter(tmp_path / "a", FACTORS, LORA)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "expected an object"), ("{", "not JSON"), (json.dumps({"r": 8}), "r is 8, this engine serves 4")],
)
def test_bad_configuration(tmp_path: Path, text: str, message: str) -> None:
    shutil.copytree(ADAPTER, tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterRefusedError, match=message):
        check_adapter(tmp_path / "a", FACTORS, LORA)
