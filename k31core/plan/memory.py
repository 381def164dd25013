"""The arithmetic of memory: what each trainer rank, engine rank and host needs, item by item, in each phase.

Weights come from the model built on `meta` (`ranks.py`) and are exact. Activations, logits and workspace are formulas,
stated beside each item; no constant here is fitted to a published total.
"""

from dataclasses import dataclass

import torch

from k31core.model.build import Build
from k31core.model.config import ModelConfig
from k31core.model.decoder import Decoder
from k31core.model.lora import trainable_slots
from k31core.model.weight_names import base_slots
from k31core.parallel.mesh import Axis, Mesh
from k31core.plan.ranks import RankWeights, lora_spec
from k31core.recipe.recipe import Recipe

BF16, FP32 = 2, 4
_ADAM = 3 * FP32
"""Bytes a parameter: fp32 master weight and two fp32 moments."""

Items = dict[str, int]
"""Bytes by item name."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One engine rank's memory, bytes by item."""

    items: Items

    @property
    def base(self) -> int:
        """Frozen weights."""
        return self.items["experts"] + self.items["base"]

    @property
    def total(self) -> int:
        """All items."""
        return sum(self.items.values())


def trainer_items(config: ModelConfig, recipe: Recipe, weights: RankWeights) -> Items:
    """One trainer rank on its card, in the training phase."""
    offloaded = recipe.train.optimizer.cpu_offload_fraction
    n = weights.adapter_parameters
    return {
        "experts": weights.expert_bytes,
        "base": weights.base_bytes,
        "adapter": n * BF16,
        "gradients": n * FP32,
        "optimizer_gpu": round(n * _ADAM * (1 - offloaded)),
        **_activations(config, recipe, weights),
    }


def trainer_host_items(recipe: Recipe, weights: RankWeights) -> Items:
    """One trainer rank's share of host memory: the offloaded optimizer always, its weights while the engine runs."""
    n = weights.adapter_parameters
    colocated = recipe.cluster.colocate and recipe.train.device == "cuda"
    offloaded = recipe.train.optimizer.cpu_offload_fraction
    items = {"optimizer_cpu": round(n * _ADAM * offloaded)}
    if offloaded:
        items["optimizer_staging"] = round(n * (FP32 + BF16) * offloaded)  # gradients down, weights up
    if colocated:
        items["offloaded_base"] = weights.expert_bytes + weights.base_bytes
        items["offloaded_adapter"] = n * (BF16 + FP32) + round(n * _ADAM * (1 - offloaded))
    return items


def _activations(config: ModelConfig, recipe: Recipe, weights: RankWeights) -> Items:
    """Largest packed microbatch under full recompute.

    tokens: what one CP rank holds; rows: its slice of them under sequence parallelism. Each checkpointed layer keeps
    its prefix [rows, D]; each snapshot keeps the bank so far. 1F1B keeps (stages - stage) microbatches in flight.
    The live layer is the largest of an expert layer (rows x k routed rows, evenly spread) and a KDA layer.
    """
    parallel = recipe.train.parallel
    tokens = recipe.train.max_tokens_per_gpu
    rows = tokens // parallel.tp if parallel.sequence_parallel else tokens
    width = config.hidden_size * BF16
    first, last = weights.layers
    block = config.attn_res_block_size
    snapshots = [i // block + 1 for i in range(first, last + 1) if i % block == 0]
    inherited = (first + block - 1) // block
    kept = rows * width * (last - first + 1 + sum(snapshots) + inherited)
    in_flight = parallel.pp - weights.stage
    if not recipe.train.recompute:
        raise ValueError("train.recompute is off: the plan knows full recompute only; turn it on")
    heads = config.kda_num_heads // parallel.tp * config.kda_head_dim
    kda = tokens * heads * (4 * BF16 + 3 * FP32)  # q k v o, log decay and two fp32 intermediates
    routed = rows * config.num_experts_per_token
    latent, ffn = config.routed_expert_hidden_size, config.moe_intermediate_size
    moe = routed * (3 * latent * BF16 + 3 * ffn * BF16 + ffn * FP32)
    mix = (inherited + sum(1 for _ in snapshots) + 1) * rows * config.hidden_size * FP32
    items = {
        "activations_kept": kept * in_flight,
        "activations_live": 2 * (max(kda, moe) + mix),  # values and their gradients
    }
    if weights.stage == parallel.pp - 1:
        chunk = min(recipe.train.logprob_chunk_tokens, tokens)
        items["logits"] = chunk * (config.vocab_size // parallel.tp) * (FP32 + BF16)
    return items


def engine_share(config: ModelConfig, recipe: Recipe) -> EngineShare:
    """One engine rank: whole experts over EP, everything else over the attention TP group of its DP group."""
    engine = recipe.rollout.engine
    attn_tp = engine.tp_size // engine.attn_dp_size
    mesh = Mesh(tp=Axis(attn_tp), ep=Axis(engine.ep_size))
    build = Build(mesh=mesh, dtype=torch.bfloat16, device=torch.device("meta"), lora=lora_spec(recipe))
    decoder = Decoder(config, build, range(config.num_hidden_layers))
    slots = base_slots(decoder)
    # Without whole experts a rank (EP below TP) each expert's width is divided over the TP ranks of its EP group.
    inside = engine.tp_size // engine.ep_size
    experts = sum(s.tensor.numel() for s in slots if s.tensor.dtype == torch.uint8) // inside
    base = sum(s.tensor.numel() * s.tensor.element_size() for s in slots if s.tensor.dtype != torch.uint8)
    factors = trainable_slots(decoder)
    expert_factors = sum(s.tensor.numel() for s in factors if ".experts." in s.name)
    adapter = (sum(s.tensor.numel() for s in factors) - expert_factors + expert_factors // inside) * BF16
    mla, kda = len(config.mla_layers), config.num_hidden_layers - len(config.mla_layers)
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * BF16
    index = config.dsa.head_dim * BF16 if config.dsa else 0
    requests = -(-engine.max_concurrent_requests // engine.attn_dp_size)
    heads = config.kda_num_heads // attn_tp
    state = heads * config.kda_head_dim * (config.kda_head_dim * FP32 + 3 * (config.short_conv_kernel_size - 1) * BF16)
    return EngineShare(
        {
            "experts": experts,
            "base": base,
            "lora_buffers": adapter,
            "kv_cache": engine.max_total_tokens * mla * latent,
            "index_keys": engine.max_total_tokens * mla * index,
            "kda_state": requests * kda * state,
        }
    )


def sync_items(recipe: Recipe) -> Items:
    """Extra memory of a sync: one bucket being filled and one being read."""
    return {"sync_buckets": 2 * recipe.sync.bucket_bytes}
