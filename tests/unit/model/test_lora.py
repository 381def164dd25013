"""The adapter's first values: by name, whatever part of it a rank holds; tied factors; targets."""

from dataclasses import replace

import pytest
import torch

from k31core.model.build import Build, LoraSpec, LoraTargetError
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.model.lora import init_adapter, trainable_slots
from k31core.model.weight_names import adapter_slots
from k31core.parallel.mesh import Axis, Mesh
from tests.model_cases import case_config, config_of, random_adapter


def decoder(lora: LoraSpec, mesh: Mesh | None = None, raw: dict | None = None) -> Decoder:
    return Decoder(parse_config(raw or case_config()), Build(lora=lora, mesh=mesh or Mesh()))


def test_names_and_shapes_are_the_adapter_files() -> None:
    raw = config_of(layers=4, mla=(2, 4))
    wanted = {name: tuple(t.shape) for name, t in random_adapter(raw, 3).items()}
    slots = adapter_slots(decoder(LoraSpec(3, 6.0), raw=raw))
    assert {slot.name: slot.shard.shape for slot in slots} == wanted
    assert all(tuple(slot.tensor.shape) == slot.shard.shape for slot in slots)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_part_is_a_part_of_the_same_adapter(rank: int) -> None:
    lora = LoraSpec(3, 6.0, seed=11)
    whole = decoder(lora)
    init_adapter(whole)
    full = {slot.name: slot.tensor for slot in adapter_slots(whole)}
    part = decoder(lora, Mesh(tp=Axis(2, rank), ep=Axis(2, rank), stage=Axis(2, rank)))
    init_adapter(part)
    smaller = 0
    for slot in adapter_slots(part):
        assert torch.equal(slot.tensor, slot.shard.take(full[slot.name])), slot.name
        smaller += slot.tensor.numel() < full[slot.name].numel()
    assert smaller > 20
    a = [slot.tensor for slot in adapter_slots(whole) if ".lora_A." in slot.name]
    assert all(t.abs().max() <= t.shape[-1] ** -0.5 and t.std() > 0 for t in a)
    other = decoder(replace(lora, seed=12))
    init_adapter(other)
    assert not torch.equal(adapter_slots(other)[0].tensor, adapter_slots(whole)[0].tensor)


def test_tied_gate_and_up_share_one_factor_under_two_names() -> None:
    tied, untied = decoder(LoraSpec(2, 4.0, tie_gate_up=True)), decoder(LoraSpec(2, 4.0))
    assert {s.name for s in adapter_slots(tied)} == {s.name for s in adapter_slots(untied)}
    mlps = 1 + 6  # one dense, six shared
    assert len(trainable_slots(untied)) - len(trainable_slots(tied)) == mlps
    by_name = {s.name: s.tensor for s in adapter_slots(tied)}
    prefix = "language_model.model.layers.0.mlp."
    assert by_name[f"{prefix}gate_proj.lora_A.weight"] is by_name[f"{prefix}up_proj.lora_A.weight"]


def test_targets() -> None:
    names = [s.name for s in adapter_slots(decoder(LoraSpec(2, 4.0, targets=("experts",))))]
    assert names and all(".experts.w" in name for name in names)
    with pytest.raises(LoraTargetError, match="q_proj"):
        LoraSpec(2, 4.0, targets=("q_proj",))
