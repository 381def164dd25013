"""Every shipped recipe parses, and says what the published settings say, value by value."""

from typing import Any

import pytest

from k31core.recipe.load import load_recipe, recipe_names, resolve

GIB = 1024**3

K31 = {
    "model.family": "kimi_k31",
    "model.name": "Kimi-K3.1",
    "model.repo": "moonshotai/Kimi-K3.1",
    "model.variant": "full",
    "model.ref_load": "native",
    "train.parallel.tp": 4,
    "train.parallel.cp": 2,
    "train.parallel.ep": 8,
    "train.parallel.etp": 1,
    "train.parallel.dp": 1,
    "train.max_tokens_per_gpu": 8192,
    "train.parallel.sequence_parallel": True,
    "train.packing": "thd",
    "train.recompute": True,
    "rollout.samples_per_prompt": 16,
    "algorithm.loss": "score_centering",
    "algorithm.importance": "none",
    "rollout.top_logprobs_num": 128,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.max_response_tokens": 3072,
    "rollout.engine.kind": "sglang",
    "rollout.engine.max_concurrent_requests": 256,
    "rollout.engine.moe_runner_backend": "marlin",
    "rollout.engine.lora_backend": "triton",
    "rollout.engine.kv_cache_dtype": "bfloat16",
    "rollout.engine.load_balance_method": "total_requests",
    "sync.transport": "cuda_ipc",
    "sync.bucket_bytes": 2 * GIB,
    "sync.check_lora_weight_equal": False,
    "train.optimizer.lr": 1e-5,
    "train.optimizer.weight_decay": 0.1,
    "train.optimizer.beta1": 0.9,
    "train.optimizer.beta2": 0.98,
    "train.optimizer.warmup_steps": 0,
    "train.optimizer.cpu_offload_fraction": 0.8,
    "train.optimizer.overlap_d2h_h2d": True,
    "train.optimizer.precision_aware": True,
    "train.lora.rank": 32,
    "train.lora.alpha": 64.0,
    "train.lora.target_modules": "all-linear",
    "train.lora.experts_shared_outer": True,
    "rollout.routing_replay": True,
    "rollout.indexer_replay": False,
    "save.interval": 5,
    "save.optimizer": False,
    "reward.grader": "deepscaler",
    "data.thinking_effort": None,
    "data.heldout": None,
    "env.variables": {"NCCL_RAS_ENABLE": "0", "SGLANG_DSA_TOPK_BROADCAST": "1"},
    "cluster.colocate": True,
    "cluster.gpus_per_node": 8,
}
K31_H200 = K31 | {
    "num_rollout": 100,
    "cluster.num_nodes": 4,
    "cluster.accelerator": "H200",
    "train.parallel.pp": 4,
    "train.parallel.first_stage_layers": 24,
    "train.parallel.last_stage_layers": 21,
    "rollout.prompts_per_step": 32,
    "rollout.dynamic_sampling": None,
    "rollout.engine.tp_size": 32,
    "rollout.engine.ep_size": 32,
    "rollout.engine.attn_dp_size": 4,
    "rollout.engine.max_total_tokens": 262144,
    "rollout.engine.lora_base_cpu_backup": True,
    "sync.resend_base": False,
    "health.validated": True,
    "health.bands": {
        "perf/step_time": [1422.0, 2010.0],
        "train/train_rollout_logprob_abs_diff": [0.014, 0.018],
        "train/train_rollout_kl": [4.4e-4, 8.2e-4],
    },
    "health.typical": {
        "perf/step_time": 1715.0,
        "perf/rollout_time": 20 * 60.0,
        "perf/train_time": 9 * 60.0,
        "perf/update_weights_time": 3 * 60.0,
        "train/grad_norm": 0.011,
    },
    "health.peaks": {"perf/gpu_peak_gib": 130.0, "perf/host_peak_gb": 1483.0},
    "health.trends": {
        "rollout/raw_reward": [0.61, 0.74],
        "rollout/truncated_ratio": [0.36, 0.18],
        "rollout/response_len/mean": [1890.0, 1370.0],
    },
}
K31_B300 = K31 | {
    "num_rollout": 100,
    "cluster.num_nodes": 2,
    "cluster.accelerator": "B300",
    "train.parallel.pp": 2,
    "train.parallel.first_stage_layers": 47,
    "train.parallel.last_stage_layers": 46,
    "rollout.prompts_per_step": 16,
    "rollout.dynamic_sampling.refill_groups": 4,
    "rollout.engine.tp_size": 16,
    "rollout.engine.ep_size": 16,
    "rollout.engine.attn_dp_size": 2,
    "rollout.engine.max_total_tokens": 524288,
    "rollout.engine.lora_base_cpu_backup": False,
    "sync.resend_base": True,
    "health.validated": False,
    "health.bands": {
        "train/train_rollout_logprob_abs_diff": [0.014, 0.015],
        "train/train_rollout_kl": [3.6e-4, 3.8e-4],
    },
}
K3 = {
    "model.family": "kimi_k3",
    "model.ref_load": "torch_dist",
    "algorithm.loss": "grpo",
    "rollout.top_logprobs_num": 0,
    "rollout.routing_replay": False,
    "rollout.dynamic_sampling": None,
    "rollout.engine.kind": "sglang",
    "rollout.engine.attn_dp_size": 1,
    "rollout.engine.moe_runner_backend": None,
    "rollout.engine.lora_backend": None,
    "rollout.engine.kv_cache_dtype": None,
    "rollout.engine.load_balance_method": None,
    "rollout.engine.lora_base_cpu_backup": True,
    "sync.transport": "cuda_ipc",
    "sync.resend_base": False,
    "train.parallel.cp": 1,
    "train.parallel.ep": 8,
    "train.parallel.etp": 1,
    "train.parallel.dp": 1,
    "train.parallel.sequence_parallel": True,
    "train.packing": "thd",
    "train.recompute": True,
    "train.optimizer.lr": 1e-5,
    "train.lora.experts_shared_outer": True,
    "train.lora.target_modules": ["o_proj", "q_a_proj", "kv_a_proj_with_mqa", "mlp", "experts"],
    "train.colocate_memory_peak_device": "gpu",
    "reward.grader": "deepscaler",
    "env.variables": {},
}
K3_FULL = K3 | {
    "num_rollout": 1000,
    "model.name": "Kimi-K3",
    "model.variant": "full",
    "cluster.num_nodes": 16,
    "cluster.gpus_per_node": 4,
    "cluster.accelerator": "GB300",
    "train.parallel.tp": 4,
    "train.parallel.pp": 8,
    "train.parallel.cp": 2,
    "train.parallel.first_stage_layers": 12,
    "train.parallel.last_stage_layers": 9,
    "train.max_tokens_per_gpu": 8192,
    "train.distributed_timeout_minutes": 60.0,
    "train.optimizer.cpu_offload_fraction": 0.8,
    "train.lora.rank": 32,
    "train.lora.alpha": 64.0,
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 8,
    "rollout.max_response_tokens": 4096,
    "rollout.engine.tp_size": 16,
    "rollout.engine.ep_size": 1,
    "rollout.engine.max_total_tokens": 65536,
    "rollout.engine.max_concurrent_requests": 8,
    "eval.name": "aime",
    "eval.interval": 10,
    "eval.temperature": 0.0,
    "observe.wandb": True,
    "health.bands": {"perf/step_time": [11 * 60.0, 13 * 60.0], "rollout/raw_reward": [0.5, 0.75]},
    "health.typical": {"perf/allocated_after_sync_gb": 91.0},
    "health.trends": {"eval/aime": [0.367, 0.467]},
}
K3_4LAYER = K3 | {
    "model.variant": "4layer",
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 8,
    "train.parallel.tp": 8,
    "train.parallel.pp": 1,
    "train.parallel.first_stage_layers": None,
    "train.parallel.last_stage_layers": None,
    "train.max_tokens_per_gpu": 512,
    "train.lora.rank": 16,
    "train.lora.alpha": 32.0,
    "rollout.engine.tp_size": 8,
    "rollout.engine.ep_size": 8,
    "rollout.engine.max_concurrent_requests": 64,
}
EXPECTED = {
    "k31-32xh200": K31_H200,
    "k31-16xb300": K31_B300,
    "k3-64xgb300": K3_FULL,
    "k3-4layer": K3_4LAYER,
}
GLOBAL_BATCH = {"k31-32xh200": 512, "k31-16xb300": 256, "k3-64xgb300": 64}
ENGINES = {"k31-32xh200": 1, "k31-16xb300": 1, "k3-64xgb300": 4, "k3-4layer": 1, "tiny": 1}


def value_at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses_and_is_called_like_its_file(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert resolve(recipe).recipe == recipe


def test_all_named_recipes_are_shipped() -> None:
    assert set(EXPECTED) <= set(recipe_names())


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in EXPECTED.items() for field in fields], ids=str
)
def test_published_value(name: str, field: str) -> None:
    assert value_at(load_recipe(name).model_dump(mode="json"), field) == EXPECTED[name][field]


@pytest.mark.parametrize(("name", "samples"), GLOBAL_BATCH.items())
def test_global_batch(name: str, samples: int) -> None:
    assert resolve(load_recipe(name)).global_batch_size == samples


@pytest.mark.parametrize(("name", "count"), ENGINES.items())
def test_number_of_engines(name: str, count: int) -> None:
    assert load_recipe(name).num_engines == count


@pytest.mark.parametrize("name", ["k31-32xh200", "k31-16xb300"])
def test_unfiltered_sampling_means_selected_candidates(name: str) -> None:
    assert resolve(load_recipe(name)).candidate_mode == "selected"


@pytest.mark.parametrize("name", ["k31-32xh200", "k31-16xb300", "k3-64xgb300"])
def test_the_layout_fills_the_cluster_and_covers_all_layers(name: str) -> None:
    recipe = load_recipe(name)
    parallel = recipe.train.parallel
    assert parallel.world_size == recipe.cluster.num_nodes * recipe.cluster.gpus_per_node
    middle = 93 - parallel.first_stage_layers - parallel.last_stage_layers
    stages = parallel.pp - 2
    assert middle == 0 if stages == 0 else middle % stages == 0
    # KDA trades heads for sequence under context parallelism: 96 heads over TP·CP ranks
    assert 96 % (parallel.tp * parallel.cp) == 0
    assert parallel.ep == parallel.tp * parallel.cp


def test_the_four_lines_users_check_at_start_up() -> None:
    resolved = resolve(load_recipe("k3-64xgb300"))
    assert resolved.expert_model_parallel_size == 8
    assert resolved.max_tokens_per_gpu == 8192
    assert resolved.colocate_memory_peak_device == "gpu"
    assert resolved.lora_base_cpu_backup is True


def test_the_kv_budget_of_a_group_holds_its_share_of_the_requests() -> None:
    for name in ("k31-32xh200", "k31-16xb300"):
        recipe = load_recipe(name)
        engine = recipe.rollout.engine
        per_group = engine.max_concurrent_requests // engine.attn_dp_size
        assert per_group * (recipe.rollout.max_response_tokens + recipe.data.max_prompt_tokens) == (
            engine.max_total_tokens
        )
