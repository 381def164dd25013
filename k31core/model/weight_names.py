"""Which checkpoint tensor fills which memory of a decoder, and the reverse: slots for reading, tensors for writing."""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from k31core.model.build import Build, ExpertFormat
from k31core.model.config import ModelConfig
from k31core.model.decoder import Decoder
from k31core.model.experts import PROJECTIONS, RoutedExperts
from k31core.model.linears import Factor
from k31core.ops.mxfp4 import encode
from k31core.parallel.sharding import Shard, Slot, Stored

PREFIX = "language_model."
"""Of every decoder tensor in the checkpoint and in the adapter."""

IGNORED_PREFIXES = ("vision_tower.", "mm_projector.")
"""Tensors that stay in the checkpoint, never loaded and never changed."""


def base_slots(decoder: Decoder) -> list[Slot]:
    """Every frozen tensor this rank holds, with its name in the checkpoint. Dense experts have none."""
    slots: list[Slot] = []
    for path, module in decoder.named_modules():
        if isinstance(module, Factor):
            continue
        if isinstance(module, RoutedExperts):
            slots.extend(_expert_slots(f"{PREFIX}{path}", module))
        slots.extend(_own_slots(path, module))
    return slots


def adapter_slots(decoder: Decoder) -> list[Slot]:
    """Every LoRA factor this rank holds, with its logical name; a tied A appears under both of its names."""
    slots: list[Slot] = []
    for path, module in decoder.named_modules(remove_duplicate=False):
        if isinstance(module, Factor):
            slots.extend(_own_slots(path, module))
    return slots


def expected_names(config: ModelConfig) -> set[str]:
    """Names of every decoder tensor a checkpoint of this configuration must have, and may have."""
    whole = Decoder(config, Build(device=torch.device("meta")), range(config.num_hidden_layers))
    names: set[str] = set()
    for path, module in whole.named_modules():
        names.update(slot.name for slot in _own_slots(path, module))
        if isinstance(module, RoutedExperts):
            names.update(name for name, _, _, _ in _expert_names(f"{PREFIX}{path}", module))
    return names


def dense_expert_slots(decoder: Decoder) -> list[Slot]:
    """Every routed expert's weight this rank holds in BF16, with its name in a BF16 checkpoint. None when packed."""
    slots: list[Slot] = []
    for path, module in decoder.named_modules():
        if isinstance(module, RoutedExperts) and module.format is ExpertFormat.DENSE:
            for name in PROJECTIONS:
                for expert, weight in enumerate(getattr(module, f"{name}_dense").detach(), start=module.first):
                    shard = Shard(tuple(weight.shape), Stored.WEIGHT)
                    slots.append(Slot(f"{PREFIX}{path}.{expert}.{name}.weight", weight, shard))
    return slots


class LayerListError(ValueError):
    """A checkpoint whose tensors are those of other layers than its configuration names: both lists are in the text."""


def check_layer_list(config: ModelConfig, names: Iterable[str], where: str) -> None:
    """Raise `LayerListError` unless the tensors have MLA and KDA attention in the layers the configuration says.

    Layers count from 1 in the text, as in `config.json`.
    """
    kinds = {"kv_a_proj_with_mqa.weight": "full_attn_layers", "A_log": "kda_layers"}
    pattern = re.compile(rf"{re.escape(PREFIX)}model\.layers\.(\d+)\.self_attn\.({'|'.join(map(re.escape, kinds))})")
    found: dict[str, set[int]] = {kind: set() for kind in kinds.values()}
    for name in names:
        if match := pattern.fullmatch(name):
            found[kinds[match[2]]].add(int(match[1]) + 1)
    full = {layer + 1 for layer in config.mla_layers}
    expected = {"full_attn_layers": full, "kda_layers": set(range(1, config.num_hidden_layers + 1)) - full}
    for kind, layers in expected.items():
        if layers != found[kind]:
            raise LayerListError(
                f"{where}: config.json has {kind} {sorted(layers)}, the tensors of the index are those of "
                f"{sorted(found[kind])}: configuration and weights are not of one checkpoint"
            )


def expected_bf16_names(config: ModelConfig) -> set[str]:
    """Names of every decoder tensor in a BF16 checkpoint: one weight where the native layout has codes and scales."""
    packed, scale = ".weight_packed", ".weight_scale"
    names = expected_names(config)
    return {name.removesuffix(packed) + ".weight" if name.endswith(packed) else name for name in names} - {
        name for name in names if name.endswith(scale)
    }


def native_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a whole decoder in the native layout: BF16 weights, F32 where the layout says so, MXFP4
    experts.

    One process only. Dense experts are encoded to MXFP4 here.
    """
    dtypes = {Stored.WEIGHT: torch.bfloat16, Stored.SMALL: torch.bfloat16, Stored.EXACT: torch.float32}
    for slot in base_slots(decoder):
        tensor = slot.tensor.detach()
        if slot.shard.stored in dtypes:
            tensor = tensor.to(dtypes[slot.shard.stored])
        if slot.shard.zero_padded_to is not None:
            tensor = nn.functional.pad(tensor, (0, slot.shard.zero_padded_to - tensor.shape[0]))
        yield slot.name, tensor
    for path, module in decoder.named_modules():
        if isinstance(module, RoutedExperts) and module.format is ExpertFormat.DENSE:
            for name in PROJECTIONS:
                for expert, weight in enumerate(getattr(module, f"{name}_dense").detach(), start=module.first):
                    packed, scale = encode(weight)
                    yield f"{PREFIX}{path}.{expert}.{name}.weight_packed", packed
                    yield f"{PREFIX}{path}.{expert}.{name}.weight_scale", scale


def _own_slots(path: str, module: nn.Module) -> Iterator[Slot]:
    shards: dict[str, Shard] = getattr(module, "shards", {})
    for local, shard in shards.items():
        yield Slot(f"{PREFIX}{path}.{local}", getattr(module, local), shard)


def _expert_slots(path: str, experts: RoutedExperts) -> Iterator[Slot]:
    if experts.format is ExpertFormat.DENSE:
        return
    for name, memory, index, stored in _expert_names(path, experts):
        tensor = getattr(experts, memory)[index]
        yield Slot(name, tensor, Shard(tuple(tensor.shape), stored))


def _expert_names(path: str, experts: RoutedExperts) -> Iterator[tuple[str, str, int, Stored]]:
    """(name in the checkpoint, attribute that holds it, index there, how it is stored) of every local expert's
    parts."""
    for index in range(experts.local):
        for name in PROJECTIONS:
            for part, stored in (("packed", Stored.PACKED), ("scale", Stored.SCALE)):
                yield f"{path}.{experts.first + index}.{name}.weight_{part}", f"{name}_{part}", index, stored
