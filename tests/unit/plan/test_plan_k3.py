"""Kimi-K3's 64 ranks, planned: layers, bytes, the published 91 GB; and the 32 ranks of its conversion."""

import pytest
import torch

from k31core.convert.bf16_to_torch_dist import bf16_decoder
from k31core.model.sizes import KIMI_K3
from k31core.model.weight_names import expected_bf16_names
from k31core.plan.fake_world import fake_mesh
from k31core.plan.plan import Plan, make_plan
from k31core.recipe.load import load_recipe
from k31core.recipe.train import ParallelRecipe
from k31core.train.base_weights import bf16_slots


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_recipe("k3-64xgb300"))


def test_64_ranks_on_16_hosts_cover_93_layers(plan: Plan) -> None:
    assert len(plan.ranks) == 64
    assert [host.ranks for host in plan.hosts] == [(4 * host, 4 * host + 3) for host in range(16)]
    stages = {rank.weights.stage: rank.weights.layers for rank in plan.ranks}
    assert [last - first + 1 for first, last in stages.values()] == [12] * 7 + [9]
    assert stages[0][0] == 0 and stages[7][1] == 92


def test_bf16_experts_of_a_middle_stage(plan: Plan) -> None:
    expert = 3 * 3584 * 3072 * 2
    by_stage = {rank.weights.stage: rank.weights.expert_bytes for rank in plan.ranks}
    assert by_stage[3] == 12 * 112 * expert
    assert by_stage[0] == 11 * 112 * expert


def test_the_published_allocation_stands_beside_the_trainers_share(plan: Plan) -> None:
    name = "perf/allocated_after_sync_gb"
    assert plan.published[name] == 91e9
    share = plan.published[name] - plan.unaccounted[name]
    kept = ("experts", "base", "adapter", "gradients", "optimizer_gpu")
    assert share == max(sum(rank.items[item] for item in kept) for rank in plan.ranks)
    assert 80e9 < share < 110e9


def test_the_recipes_conversion_on_32_ranks_writes_every_tensor_exactly_once() -> None:
    """TP32 EP32 at the published sizes: the ranks' parts of every tensor tile it."""
    layout = ParallelRecipe(tp=32, ep=32)
    layers = range(2, 5)  # KDA, an MLA layer and experts; the widths are the same in all 93
    elements: dict[str, int] = {}
    shapes = {}
    for rank in range(32):
        with fake_mesh(layout, rank) as mesh:
            for slot in bf16_slots(bf16_decoder(KIMI_K3, mesh, layers, torch.device("meta"))):
                shapes[slot.name] = slot.shard.shape
                if slot.shard.whole and ".experts." not in slot.name:
                    elements[slot.name] = slot.tensor.numel()  # replicated: written by one of them
                else:
                    elements[slot.name] = elements.get(slot.name, 0) + slot.tensor.numel()
    assert all(elements[name] == torch.Size(shape).numel() for name, shape in shapes.items())
    prefixes = tuple(f"language_model.model.layers.{layer}." for layer in layers)
    assert {name for name in expected_bf16_names(KIMI_K3) if name.startswith(prefixes)} == {
        name for name in shapes if name.startswith(prefixes)
    }
