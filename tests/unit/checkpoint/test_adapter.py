"""Adapter directories: read, written, sliced, and refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.adapter import (
    WEIGHTS_FILE,
    AdapterConfig,
    AdapterError,
    load_adapter,
    read_adapter_config,
    write_adapter,
)
from k31core.model.build import Build, LoraSpec
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import adapter_slots
from k31core.parallel.mesh import Axis, Mesh
from k31core.parallel.sharding import Slot
from tests.model_cases import CASES, P, config_of, random_adapter

RAW = config_of(layers=3, mla=(2,))
B = f"{P}model.layers.1.self_attn.q_a_proj.lora_B.weight"


def slots_of(lora: LoraSpec, mesh: Mesh | None = None) -> list[Slot]:
    return adapter_slots(Decoder(parse_config(RAW), Build(lora=lora, mesh=mesh or Mesh())))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", AdapterConfig(3, 6.0, None), random_adapter(RAW, 3))
    return tmp_path / "adapter"


def test_round_trip_and_slices(directory: Path) -> None:
    stored = load_file(directory / WEIGHTS_FILE)
    assert read_adapter_config(directory) == AdapterConfig(3, 6.0, None)
    for mesh in (Mesh(), Mesh(tp=Axis(2, 1), ep=Axis(4, 3))):
        slots = slots_of(LoraSpec(3, 6.0), mesh)
        load_adapter(directory, slots)
        for slot in slots:
            assert torch.equal(slot.tensor, slot.shard.take(stored[slot.name])), slot.name


def test_case_configuration() -> None:
    assert read_adapter_config(CASES / "tiny-k31-adapter") == AdapterConfig(4, 8.0, None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("r", 0, "'r' must be"),
        ("r", "4", "'r' must be"),
        ("lora_alpha", None, "lora_alpha"),
        ("experts_shared_outer_loras", False, "experts_shared_outer_loras"),
        ("target_modules", 3, "target_modules"),
        ("lora_dropout", 0.1, "lora_dropout"),
    ],
)
def test_configuration_fields_are_checked(directory: Path, field: str, value: object, message: str) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(AdapterError, match=message):
        read_adapter_config(directory)


def change(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, directory / WEIGHTS_FILE)


def test_bad_tensors_are_named_and_nothing_is_changed(directory: Path) -> None:
    slots = slots_of(LoraSpec(3, 6.0))
    before = [slot.tensor.clone() for slot in slots]
    stored = load_file(directory / WEIGHTS_FILE)
    nan = stored[B].clone()
    nan[4, 1] = float("nan")
    for tensor, message in (
        (None, f"missing, first '{B}'"),
        (stored[B][:, :2].clone(), r"has shape \[16, 2\], this model and rank need \[16, 3\]"),
        (nan, r"nan at index \(4, 1\)"),
        (stored[B].double(), "dtype F64"),
    ):
        change(directory, B, tensor)
        with pytest.raises(AdapterError, match=message):
            load_adapter(directory, slots)
        change(directory, B, stored[B])
    change(directory, "extra", stored[B])
    with pytest.raises(AdapterError, match="no adapter target of this model, first 'extra'"):
        load_adapter(directory, slots)
    assert all(torch.equal(slot.tensor, old) for slot, old in zip(slots, before, strict=True))


def test_another_rank_or_target_set_is_refused(directory: Path) -> None:
    with pytest.raises(AdapterError, match="this model and rank need"):
        load_adapter(directory, slots_of(LoraSpec(4, 6.0)))
    with pytest.raises(AdapterError, match="no adapter target"):
        load_adapter(directory, slots_of(LoraSpec(3, 6.0, targets=("experts",))))


def test_tied_factors_must_be_equal_in_the_file(tmp_path: Path, directory: Path) -> None:
    slots = slots_of(LoraSpec(3, 6.0, tie_gate_up=True))
    with pytest.raises(AdapterError, match=r"ties .*gate_proj.lora_A.* and .*up_proj.lora_A"):
        load_adapter(directory, slots)
    write_adapter(tmp_path / "tied", AdapterConfig(3, 6.0, None), random_adapter(RAW, 3, tied=True))
    load_adapter(tmp_path / "tied", slots)


def test_non_finite_values_are_not_written(tmp_path: Path) -> None:
    tensors = random_adapter(RAW, 3)
    tensors[B][0, 0] = float("inf")
    with pytest.raises(AdapterError, match=r"q_a_proj.lora_B.weight has inf at index \(0, 0\)"):
        write_adapter(tmp_path / "adapter", AdapterConfig(3, 6.0, None), tensors)
    assert not (tmp_path / "adapter").exists()
