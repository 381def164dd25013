"""The rollout worker with the real engine, graders and data on a small random checkpoint."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from k31core.checkpoint import commit as commits
from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.convert.tiny_data import make_arithmetic_dataset
from k31core.convert.tiny_tokenizer import write_tokenizer
from k31core.recipe.load import load_recipe, resolve
from k31core.rollout.engine import EngineError
from k31core.rollout.evaluation import pass_at_k
from k31core.rollout.prepare_data import PrepareSettings, prepare_split
from k31core.rollout.records import read_groups
from k31core.rollout.text import TextCodec, TokenizerError
from k31core.workers.rollout import RolloutWorker
from tests.model_cases import config_of, random_adapter, write_checkpoint

OVERRIDES = (
    "rollout.prompts_per_step=3",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=4",
    "rollout.top_logprobs_num=5",
    "train.lora.rank=4",
    "train.lora.alpha=8",
    "eval.max_prompts=3",
    "eval.samples_per_prompt=2",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(model directory, data directory, adapter directory) of a random model with the tiny tokenizer."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("prepared")
    raw = config_of(layers=4, mla=(4,), vocab_size=32)
    model = root / "model"
    model.mkdir()
    write_checkpoint(model, raw)
    write_tokenizer(model)
    make_arithmetic_dataset(root / "raw", max_operand=9, heldout_one_in=5, seed=0)
    for name in ("train", "heldout"):
        made = prepare_split(root / "raw", model, root / "prepared", PrepareSettings(name, 32))
        (root / "data").mkdir(exist_ok=True)
        (root / "data" / name).symlink_to(made)
    adapter = root / "adapter"
    adapter.mkdir()
    save_file(random_adapter(raw, 4), adapter / "adapter_model.safetensors")
    config = json.loads((Path(__file__).parents[2] / "cases/model/tiny-k31-adapter/adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return model, root / "data", adapter


def with_worker(prepared, run_dir, body, *overrides):
    """Run `body(worker)` with a started worker."""
    model, data, _ = prepared
    recipe = load_recipe("tiny", (*OVERRIDES, *overrides))
    text = resolve(recipe).model_dump_json() if overrides else recipe.model_dump_json()

    async def main():
        worker = RolloutWorker(text, str(run_dir), str(model), str(data))
        with pytest.raises(EngineError, match="not started"):
            await worker.score([1, 2])
        try:
            assert await worker.start() == {"train_prompts": 60, "heldout_prompts": 21}
            return await body(worker)
        finally:
            await worker.close()
            await worker.close()

    return asyncio.run(main())


def test_step_is_committed_once_and_returned_afterwards(prepared, tmp_path):
    adapter = prepared[2]

    async def body(worker):
        with pytest.raises(EngineError, match="version 0 is wanted, the engine serves -1"):
            await worker.run(1, None, 0, None)
        first = await worker.run(1, None, 0, str(adapter))
        again = await worker.run(1, None, 0, str(adapter))
        following = await worker.run(2, first["cursor"], 0, None)
        health = await worker.health()
        score = await worker.score([1, 2, 3])
        return first, again, following, health, score

    first, again, following, health, score = with_worker(prepared, tmp_path, body)
    assert again == first and json.loads(json.dumps(first)) == first
    directory = tmp_path / "rollouts" / "step-00001"
    assert first["directory"] == str(directory)
    manifest = commits.verify_directory(directory)
    assert manifest["files"] == first["files"]
    assert manifest["facts"]["engine_adapter_digest"] == digest_of_file(adapter / "adapter_model.safetensors")
    groups = read_groups(directory)
    assert [len(group.samples) for group in groups] == [2, 2, 2]
    for group in groups:
        for sample in group.samples:
            assert sample.completion.policy_version == 0
            assert sample.completion.top_ids.shape[1] == 5
            assert sample.completion.routing.shape[1:] == (4, 3)
            assert sample.verdict.deepscaler is not None and sample.verdict.math_verify is not None
    assert [p["prompt_id"] for p in first["prompts"]] == [g.prompt.prompt_id for g in groups]
    assert {p["prompt_id"] for p in first["prompts"]}.isdisjoint(p["prompt_id"] for p in following["prompts"])
    metrics = first["metrics"]
    for name in (
        "rollout/raw_reward",
        "rollout/raw_reward_unfiltered",
        "rollout/response_len/mean",
        "rollout/response_len/median",
        "rollout/response_len/max",
        "rollout/response_len/min",
        "rollout/truncated_ratio",
        "reward/no_box",
        "reward/no_think_end",
        "reward/truncated",
        "reward/disagreement_rate",
        "perf/rollout_time",
        "perf/tokens_per_gpu_per_sec",
    ):
        assert np.isfinite(metrics[name]), name
    assert health["alive"] and health["policy_version"] == 0 and health["running"] == 0
    assert len(score) == 2


def test_redrawn_rollout_has_the_same_bytes(prepared, tmp_path):
    """Another process, the same step: equal files; a damaged or foreign commit is set aside and drawn again."""
    adapter = prepared[2]

    async def body(worker):
        return await worker.run(1, None, 0, str(adapter))

    first = with_worker(prepared, tmp_path / "a", body)
    second = with_worker(prepared, tmp_path / "b", body)
    assert first["files"] == second["files"] and first["prompts"] == second["prompts"]
    columns = tmp_path / "a" / "rollouts" / "step-00001" / "samples.safetensors"
    columns.write_bytes(columns.read_bytes()[:-4])
    third = with_worker(prepared, tmp_path / "a", body)
    assert third["files"] == first["files"]
    assert (tmp_path / "a" / "rollouts" / "step-00001.bad-1").is_dir()

    async def other_version(worker):
        return await worker.run(1, None, 5, str(adapter))

    fourth = with_worker(prepared, tmp_path / "a", other_version)
    assert (tmp_path / "a" / "rollouts" / "step-00001.stale-1").is_dir()
    assert read_groups(Path(fourth["directory"]))[0].samples[0].completion.policy_version == 5


def test_evaluation_metrics_and_table(prepared, tmp_path):
    adapter = prepared[2]

    async def body(worker):
        await worker.load_adapter(str(adapter), 3)
        await worker.sleep()
        await worker.wake()
        return await worker.evaluate(7, 3), await worker.evaluate(8, 3)

    metrics, again = with_worker(prepared, tmp_path, body, "eval.name=aime")
    assert {k: v for k, v in metrics.items() if "time" not in k} == {k: v for k, v in again.items() if "time" not in k}
    assert metrics["eval/aime/problems"] == 3
    assert metrics["eval/aime"] == metrics["eval/aime/pass@1"] and "eval/aime/pass@2" in metrics
    for name in ("truncated_ratio", "format_ratio", "response_len/mean"):
        assert np.isfinite(metrics[f"eval/aime/{name}"])
    table = json.loads((tmp_path / "eval" / "aime-step-00007.json").read_text())
    assert len(table["problems"]) == 3 and table["problems"][0]["samples"] == 2
    assert set(table["problems"][0]) >= {"prompt_id", "label", "right", "truncated", "first_answer"}


def test_a_worker_for_an_evaluation_needs_no_training_prompts(prepared, tmp_path):
    """`k31 eval`: the held-out set alone, the base before any adapter, a table named after how it was asked."""
    model, data, adapter = prepared
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heldout").symlink_to((data / "heldout").resolve())
    overrides = (*OVERRIDES, "eval.name=aime-2024", "eval.samples_per_prompt=3", "eval.temperature=0.5")
    text = load_recipe("tiny", overrides).model_dump_json()

    async def main():
        worker = RolloutWorker(text, str(tmp_path), str(model), str(tmp_path / "data"), evaluate_only=True)
        try:
            assert await worker.start() == {"train_prompts": 0, "heldout_prompts": 21}
            with pytest.raises(ValueError, match="no training prompts"):
                await worker.run(1, None, -1, None)
            base = await worker.evaluate(0, -1)
            digest = (await worker.load_adapter(str(adapter), 7))["digest"]
            return base, await worker.evaluate(7, 7), digest
        finally:
            await worker.close()

    base, after, digest = asyncio.run(main())
    assert set(base) == set(after) >= {"eval/aime-2024", "eval/aime-2024/pass@1", "eval/aime-2024/pass@3"}
    tables = [json.loads(path.read_text()) for path in sorted((tmp_path / "eval").iterdir())]
    names = [f"aime-2024-step-0000{step}-n3-t0.5.json" for step in (0, 7)]
    assert [path.name for path in sorted((tmp_path / "eval").iterdir())] == names
    assert [(t["policy_version"], t["adapter_digest"]) for t in tables] == [(-1, None), (7, digest)]
    assert all((t["samples_per_prompt"], t["temperature"]) == (3, 0.5) and len(t["problems"]) == 3 for t in tables)
    assert all(len(problem["reasons"]) == problem["samples"] == 3 for problem in tables[1]["problems"])


def test_pass_at_k_is_the_unbiased_estimate():
    """Against the average over all subsets."""
    from itertools import combinations

    for right in range(6):
        outcomes = [1] * right + [0] * (5 - right)
        for k in range(1, 6):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(5, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_stop_tokens_and_missing_tokenizer(prepared, tmp_path):
    model = prepared[0]
    codec = TextCodec.load(model)
    assert codec.stop_token_ids == (2,)
    with pytest.raises(TokenizerError, match="tokenizer cannot be loaded"):
        TextCodec.load(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes((model / name).read_bytes())
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert TextCodec.load(copy).stop_token_ids == (2, 5)
    (copy / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(TokenizerError, match="eos_token_id is 'x'"):
        TextCodec.load(copy)
