"""A checkpoint of random weights at real widths, in the published layout: for measuring speed where no checkpoint is.

Written tensor by tensor (in shards of 4 GiB), so its size is bounded by the disk and not by memory. The weights other
than experts have the tiny checkpoint's first values; an expert's codes are uniform, under a scale that gives them the
usual spread.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31core.checkpoint.native import write_native_checkpoint
from k31core.convert.tiny_model import first_value, tiny_config
from k31core.model.build import Build
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import base_slots
from k31core.parallel.sharding import Slot, Stored
from k31core.recipe.model import RandomCheckpoint

_CODE_RMS = 2.8
"""Root mean square of the sixteen E2M1 values, each as likely."""
_STORED_AS = {Stored.WEIGHT: torch.bfloat16, Stored.SMALL: torch.bfloat16, Stored.EXACT: torch.float32}


def random_config(sizes: RandomCheckpoint, family: str) -> dict[str, Any]:
    """`config.json` of these sizes."""
    raw = tiny_config(family=family, hidden_size=sizes.hidden_size, num_hidden_layers=sizes.num_hidden_layers)
    text = raw["text_config"]
    text.update(
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        q_lora_rank=sizes.q_lora_rank,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.qk_nope_head_dim,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        v_head_dim=sizes.v_head_dim,
        num_experts=sizes.num_experts,
        num_experts_per_token=sizes.num_experts_per_token,
        moe_intermediate_size=sizes.moe_intermediate_size,
        routed_expert_hidden_size=sizes.routed_expert_hidden_size,
        attn_res_block_size=sizes.attn_res_block_size,
        max_position_embeddings=1048576,
    )
    text["linear_attn_config"].update(num_heads=sizes.num_heads, head_dim=sizes.kda_head_dim)
    if "dsa_config" in text:
        text["dsa_config"].update(
            index_n_heads=sizes.index_n_heads, index_head_dim=sizes.index_head_dim, index_topk=sizes.index_topk
        )
    return raw


def make_random_checkpoint(sizes: RandomCheckpoint, family: str, directory: Path, device: torch.device) -> int:
    """Write the checkpoint into a new directory, drawing on `device`; returns its bytes. No tokenizer is made.

    The same arguments give the same bytes on the same kind of device. Raises ConfigError for sizes that do not fit.
    """
    raw = random_config(sizes, family)
    decoder = Decoder(parse_config(raw), Build(device=torch.device("meta")))
    generator = torch.Generator(device).manual_seed(sizes.seed)
    layers = sizes.num_hidden_layers
    tensors: Iterator[tuple[str, Tensor]] = ((s.name, _value(s, layers, generator)) for s in base_slots(decoder))
    write_native_checkpoint(directory, raw, tensors)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@torch.no_grad()
def _value(slot: Slot, layers: int, generator: torch.Generator) -> Tensor:
    shape, stored = slot.shard.shape, slot.shard.stored
    if stored is Stored.PACKED:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=generator.device)
    if stored is Stored.SCALE:
        inputs = shape[-1] * 32
        byte = 127 + round(math.log2(inputs**-0.5 / _CODE_RMS))
        return torch.full(shape, byte, dtype=torch.uint8, device=generator.device)
    value = first_value(slot.name, torch.Size(shape), layers, generator).to(_STORED_AS[stored])
    if slot.shard.zero_padded_to is not None:
        value = torch.nn.functional.pad(value, (0, slot.shard.zero_padded_to - value.shape[0]))
    return value
