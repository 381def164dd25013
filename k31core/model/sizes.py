"""The published sizes of Kimi-K3 and Kimi-K3.1, for planning without a checkpoint.

Source: the model table of Kimi-K3's public implementations (Megatron-Bridge, SGLang, vLLM); K3.1 is K3 with an indexer
on its MLA layers. A run never uses these: its sizes come from the checkpoint's own `config.json`.
"""

from dataclasses import replace

from k31core.model.config import DsaConfig, ModelConfig

KIMI_K3 = ModelConfig(
    family="kimi_k3",
    hidden_size=7168,
    intermediate_size=33792,
    num_hidden_layers=93,
    vocab_size=163840,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    attn_res_block_size=12,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    short_conv_kernel_size=4,
    gate_lower_bound=-5.0,
    mla_layers=(*range(3, 92, 4), 92),
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    first_k_dense_replace=1,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    routed_scaling_factor=1.0,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    dsa=None,
)
KIMI_K31 = replace(KIMI_K3, family="kimi_k31", dsa=DsaConfig(n_heads=32, head_dim=128, topk=2048))
PUBLISHED = {"kimi_k3": KIMI_K3, "kimi_k31": KIMI_K31}
