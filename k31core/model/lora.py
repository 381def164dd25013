"""The adapter of a decoder: its first values and its trainable tensors.

Where the bypass is computed: `k31core.model.linears` (delta = alpha / rank * B(A x)) and `k31core.ops.experts`.
"""

import torch
from torch import nn

from k31core.model.build import Build, LoraSpec
from k31core.model.config import ModelConfig
from k31core.model.decoder import Decoder
from k31core.model.linears import kaiming_rows
from k31core.model.weight_names import adapter_slots
from k31core.parallel.sharding import Slot


class NoAdapterError(ValueError):
    """A decoder that was built without LoRA was asked for its adapter."""


@torch.no_grad()
def init_adapter(decoder: Decoder) -> None:
    """A Kaiming-uniform and B zero, from (seed, logical name) alone: the same adapter in any layout, expert by
    expert."""
    lora = decoder.build.lora
    if lora is None:
        raise NoAdapterError("the decoder was built without a LoraSpec")
    seen: set[int] = set()
    for slot in adapter_slots(decoder):
        if id(slot.tensor) in seen:  # the second name of a tied A
            continue
        seen.add(id(slot.tensor))
        if ".lora_B." in slot.name:
            slot.tensor.zero_()
            continue
        rank, width = slot.shard.shape[-2:]
        if len(slot.shard.shape) == 3 and slot.shard.shape[0] > 1:
            for offset in range(slot.tensor.shape[0]):
                expert = slot.shard.start + offset
                slot.tensor[offset] = kaiming_rows(f"{slot.name}[{expert}]", lora.seed, rank, width)
        else:
            full = kaiming_rows(slot.name, lora.seed, rank, width).view(slot.shard.shape)
            slot.tensor.copy_(slot.shard.take(full))


def trainable_slots(decoder: Decoder) -> list[Slot]:
    """Each trainable factor once, in a fixed order; a tied A under its first name."""
    seen: set[int] = set()
    slots = []
    for slot in adapter_slots(decoder):
        if id(slot.tensor) not in seen:
            seen.add(id(slot.tensor))
            slots.append(slot)
    return slots


def adapter_shapes(config: ModelConfig, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of the whole adapter, whatever part of it a rank holds; built on `meta`."""
    whole = Decoder(config, Build(device=torch.device("meta"), lora=lora), range(config.num_hidden_layers))
    return {slot.name: slot.shard.shape for slot in adapter_slots(whole)}


def adapter_parameters(decoder: Decoder) -> list[nn.Parameter]:
    """The trainable factors as parameters, for an optimizer."""
    return [slot.tensor for slot in trainable_slots(decoder)]  # type: ignore[misc]
