"""Combinations that cannot run: each names the field, the value and the way out."""

import pytest

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import load_recipe

H200, B300, K3, SMOKE = "k31-32xh200", "k31-16xb300", "k3-64xgb300", "k3-4layer"

REFUSALS: list[tuple[str, list[str], str]] = [
    ("tiny", ["rollout.samples_per_prompt=1"], r"samples_per_prompt is 1: .* use 2 or more"),
    ("tiny", ["rollout.top_logprobs_num=0"], r"top_logprobs_num is 0: score centering needs .* use 128"),
    ("tiny", ["rollout.temperature=0"], r"rollout\.temperature"),
    ("tiny", ["train.device=cuda"], r"1 ranks .* the cluster has 0 GPUs .* must be equal"),
    ("tiny", ["train.max_tokens_per_gpu=40"], r"52 tokens .* more than train\.max_tokens_per_gpu x cp = 40"),
    ("tiny", ["rollout.engine.max_total_tokens=51"], r"max_total_tokens 51 cannot hold one sample of 52 tokens"),
    ("tiny", ["rollout.engine.tp_size=2"], r"the embedded engine is one process"),
    ("tiny", ["sync.transport=cuda_ipc"], r"sync\.transport 'cuda_ipc' needs an SGLang engine; use 'shared_files'"),
    ("tiny", ["train.backend=megatron", "train.parallel.dp=3"], r"dp 3 does not divide the global batch 16 x 8 = 128"),
    ("tiny", ["train.backend=plain", "train.parallel.dp=2"], r"backend 'plain' is one process, the layout has 2 ranks"),
    ("tiny", ["train.parallel.sequence_parallel=true"], r"sequence_parallel needs tp > 1"),
    ("tiny", ["train.parallel.etp=2"], r"etp is 2: shared outer LoRA factors need expert-TP 1"),
    ("tiny", ["train.parallel.virtual_pp=2"], r"virtual_pp is set: .* leave it out"),
    ("tiny", ["train.parallel.first_stage_layers=3"], r"first_stage_layers/last_stage_layers need pp > 1"),
    ("tiny", ["train.optimizer.cpu_offload_fraction=0.8"], r"cpu_offload_fraction needs train\.device 'cuda'"),
    ("tiny", ["train.lora.target_modules=[o_proj, q_proj]"], r"target_modules has \['q_proj'\]; known: .*'o_proj'"),
    ("tiny", ["train.lora.target_modules=[]"], r"target_modules has no entry"),
    ("tiny", ["train.lora.experts_shared_outer=false"], r"only shared outer factors are implemented"),
    ("tiny", ["model.tiny=null"], r"model\.tiny must be given exactly when model\.source is 'tiny'"),
    ("tiny", ["model.trust_remote_code=true"], r"needs model\.revision to be a full 40-digit commit, got None"),
    ("tiny", ["eval.temperature=0"], r"samples_per_prompt > 1 needs eval\.temperature > 0"),
    ("tiny", ["health.bands={perf/step_time: [3, 2]}"], r"health\.bands\.perf/step_time is \(3\.0, 2\.0\)"),
    (H200, ["train.parallel.ep=7"], r"ep 7 does not divide TP·CP·DP = 8"),
    (H200, ["train.parallel.tp=8"], r"64 ranks \(TP·PP·CP·DP\) but the cluster has 32 GPUs \(4 x 8\)"),
    (H200, ["rollout.engine.attn_dp_size=3"], r"attn_dp_size 3 does not divide tp_size 32"),
    (H200, ["rollout.engine.ep_size=5"], r"ep_size 5 does not divide tp_size 32"),
    (H200, ["rollout.engine.tp_size=64", "rollout.engine.ep_size=64"], r"tp_size 64 does not divide .* 32 GPUs"),
    (H200, ["rollout.engine.lora_base_cpu_backup=false"], r"lora_base_cpu_backup is off.*set sync\.resend_base: true"),
    (H200, ["sync.resend_base=true"], r"resend_base is true although .*lora_base_cpu_backup.*turn one of them off"),
    (H200, ["sync.transport=in_process"], r"'in_process' needs the embedded engine; use 'cuda_ipc'"),
    (H200, ["model.ref_load=torch_dist"], r"ref_load 'torch_dist' is the Kimi-K3 path"),
    (H200, ["model.repo=null"], r"model\.repo is missing"),
    (H200, ["env.variables.SGLANG_DSA_TOPK_BROADCAST='0'"], r"SGLANG_DSA_TOPK_BROADCAST is '0'.* set it to '1'"),
    (H200, ["env.variables.NCCL_IB_HCA=^mlx5_1"], r"\^mlx5_1.* is a prefix match .*write \^=mlx5_1"),
    (
        H200,
        ["rollout.engine.server_urls=['http://a:1', 'http://b:1']"],
        r"names 2 servers, the cluster holds 1 engines",
    ),
    (H200, ["rollout.top_p=0.9"], r"top_p 0\.9, top_k 0 with rollout\.top_logprobs_num 128: SGLang records"),
    (K3, ["rollout.indexer_replay=true"], r"indexer_replay needs model\.family 'kimi_k31'"),
    (K3, ["algorithm.loss=score_centering"], r"top_logprobs_num is 0: score centering needs"),
    (SMOKE, ["rollout.max_response_tokens=257"], r"513 tokens .* more than train\.max_tokens_per_gpu x cp = 512"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSALS, ids=[" ".join(r[1]) for r in REFUSALS])
def test_refused_by_name(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(name, overrides)


@pytest.mark.parametrize("name", [H200, B300, K3, SMOKE, "tiny"])
def test_the_same_recipes_without_the_fault_parse(name: str) -> None:
    load_recipe(name)
