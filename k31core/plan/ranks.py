"""Every trainer rank of a layout, built from the real model code on the `meta` device, and what it holds.

No memory is used for weights, and no rank but its own place is looked at: names, shapes and bytes are those that the
rank would allocate.
"""

from dataclasses import dataclass

import torch

from k31core.model.build import LORA_TARGETS, Build, ExpertFormat, LoraSpec
from k31core.model.config import ModelConfig
from k31core.model.decoder import Decoder
from k31core.model.lora import trainable_slots
from k31core.model.weight_names import base_slots
from k31core.parallel.mesh import Mesh, stage_layers
from k31core.parallel.ownership import owned
from k31core.parallel.sharding import Stored
from k31core.plan.fake_world import fake_mesh
from k31core.recipe.recipe import Recipe

_PACKED = (Stored.PACKED, Stored.SCALE)


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What one rank holds before anything runs. Bytes, but for the counts."""

    rank: int
    stage: int
    layers: tuple[int, int]
    """First and last absolute layer, 0-based."""
    tensors: int
    """Base tensors read from the checkpoint."""
    base_parameters: int
    """Frozen parameters on this rank; two codes to a packed byte, scales not counted."""
    expert_bytes: int
    """Routed experts as they lie in memory: packed codes and scales, or BF16."""
    base_bytes: int
    """Everything frozen that is not a routed expert."""
    adapter_parameters: int
    """Trainable parameters on this rank, replicated factors included."""
    adapter_owned: int
    """Parameters of which this rank is the first holder: summed over ranks they are the adapter."""


def lora_spec(recipe: Recipe) -> LoraSpec:
    """The adapter that a recipe asks for."""
    lora = recipe.train.lora
    targets = LORA_TARGETS if lora.target_modules == "all-linear" else lora.target_modules
    return LoraSpec(lora.rank, lora.alpha, tuple(targets), lora.tie_gate_up, torch.bfloat16, recipe.seed)


def build_rank(config: ModelConfig, recipe: Recipe, rank: int) -> RankWeights:
    """Build one trainer rank on `meta` and count what it holds. Raises LayoutError."""
    parallel = recipe.train.parallel
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    with fake_mesh(parallel, rank) as mesh:
        layers = stage_layers(config.num_hidden_layers, parallel.pp, first, last)[mesh.pp.rank]
        return _count(Decoder(config, _build(recipe, mesh), layers), rank, layers)


def _build(recipe: Recipe, mesh: Mesh) -> Build:
    packed = recipe.model.ref_load == "native"
    return Build(
        mesh=mesh,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        lora=lora_spec(recipe),
        experts=ExpertFormat.PACKED if packed else ExpertFormat.DENSE,
        recompute=recipe.train.recompute,
    )


def _count(decoder: Decoder, rank: int, layers: range) -> RankWeights:
    slots = base_slots(decoder)
    packed = sum(s.tensor.numel() for s in slots if s.shard.stored in _PACKED)
    dense = sum(p.numel() * p.element_size() for n, p in decoder.named_parameters() if n.endswith("_dense"))
    codes = sum(s.tensor.numel() for s in slots if s.shard.stored is Stored.PACKED)
    experts = sum(p.numel() for n, p in decoder.named_parameters() if n.endswith("_dense"))
    others = sum(s.tensor.numel() for s in slots if s.shard.stored not in _PACKED)
    base = sum(s.tensor.numel() * s.tensor.element_size() for s in slots if s.shard.stored not in _PACKED)
    factors = trainable_slots(decoder)
    mesh = decoder.build.mesh
    return RankWeights(
        rank=rank,
        stage=mesh.pp.rank,
        layers=(layers[0], layers[-1]),
        tensors=len(slots),
        base_parameters=2 * codes + experts + others,
        expert_bytes=packed + dense,
        base_bytes=base,
        adapter_parameters=sum(s.tensor.numel() for s in factors),
        adapter_owned=sum(s.tensor.numel() for s in owned(factors, mesh)),
    )
