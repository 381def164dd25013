"""The sizes of `k31-1xh200` shrunken until a CPU runs it: overrides of the same recipe."""

SHRUNKEN = (
    "model.random={num_hidden_layers: 5, num_experts: 8, num_experts_per_token: 2, hidden_size: 64, "
    "intermediate_size: 128, vocab_size: 96, num_heads: 4, kda_head_dim: 16, q_lora_rank: 32, kv_lora_rank: 32, "
    "qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16, index_n_heads: 4, index_head_dim: 16, index_topk: 16, "
    "routed_expert_hidden_size: 32, moe_intermediate_size: 32}",
    "train.device=cpu",
    "cluster.gpus_per_node=0",
    "cluster.accelerator=null",
    "data.max_prompt_tokens=24",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=12",
    "rollout.top_logprobs_num=16",
    "rollout.engine.max_concurrent_requests=8",
    "rollout.engine.max_total_tokens=1024",
    "train.lora.rank=8",
    "train.max_tokens_per_gpu=128",
)
