"""Floating-point operations of one training step, for `perf/actor_train_tflops`. Counted from the configuration.

Model operations only: forward, and the backward through frozen weights (no gradient of the weights themselves), so
twice the forward; what recomputation repeats is not counted as useful work. Adapters and elementwise work are left out
(a few percent at rank 32 of the published sizes).
"""

from collections.abc import Iterable

from k31core.model.config import ModelConfig


def forward_flops(config: ModelConfig, lengths: Iterable[int]) -> float:
    """2 x multiply-adds of one forward over sequences of these token counts, head included."""
    lengths = list(lengths)
    tokens = sum(lengths)
    per_token = sum(_layer_weights(config, layer) for layer in range(config.num_hidden_layers))
    per_token += config.vocab_size * config.hidden_size
    total = 2.0 * tokens * per_token
    for layer in range(config.num_hidden_layers):
        total += sum(_mixing(config, layer, n) for n in lengths)
    return total


def train_flops(config: ModelConfig, lengths: Iterable[int]) -> float:
    """Forward and backward of one step."""
    return 2.0 * forward_flops(config, lengths)


def _layer_weights(config: ModelConfig, layer: int) -> int:
    """Weights every token is multiplied with."""
    hidden, ffn, latent = config.hidden_size, config.moe_intermediate_size, config.routed_expert_hidden_size
    if config.is_mla(layer):
        heads = config.num_attention_heads
        attention = hidden * config.q_lora_rank + config.q_lora_rank * heads * config.qk_head_dim
        attention += hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        attention += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        attention += 2 * hidden * heads * config.v_head_dim
        if config.dsa is not None:
            width = config.dsa.n_heads * config.dsa.head_dim
            attention += config.q_lora_rank * width + hidden * (config.dsa.head_dim + config.dsa.n_heads)
    else:
        inner = config.kda_num_heads * config.kda_head_dim
        attention = 5 * hidden * inner + config.kda_head_dim * (hidden + inner) + hidden * config.kda_num_heads
    if not config.is_moe(layer):
        return attention + 3 * hidden * config.intermediate_size
    routed = config.num_experts_per_token * 3 * latent * ffn + 2 * hidden * latent + hidden * config.num_experts
    return attention + routed + 3 * hidden * config.shared_intermediate_size


def _mixing(config: ModelConfig, layer: int, n: int) -> float:
    """Operations between the tokens of one sequence of n tokens."""
    if not config.is_mla(layer):
        # state update and read of the delta rule: three products with a d x d state for each token and head
        return 6.0 * n * config.kda_num_heads * config.kda_head_dim**2
    pairs = n * (n + 1) / 2
    index = 0.0
    if config.dsa is not None:
        index = 2.0 * pairs * config.dsa.n_heads * config.dsa.head_dim
        full = min(n, config.dsa.topk)
        pairs = full * (full + 1) / 2 + (n - full) * config.dsa.topk
    return index + 2.0 * pairs * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
