"""The trainer's process: committed rollouts in, metrics and exports out, everything JSON."""

import dataclasses
import json

import numpy as np
import pytest

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.recipe.load import load_recipe
from k31core.rl.types import Completion, FinishReason, GradeReason, Group, Prompt, Sample, Verdict
from k31core.rollout.records import write_groups
from k31core.workers.train import StepOrderError, TrainWorker, train_samples
from tests.unit.train.small_trainer import MODEL, OVERRIDES, rollout, small_trainer


def as_groups(samples):
    """Trainer samples as the groups an engine would have recorded; rewards alternate."""
    groups = {}
    for i, s in enumerate(samples):
        index = int(s.sample_id.split("-")[1])
        prompt = Prompt(f"prompt-{index}", tuple(map(int, s.prompt)), "0", index)
        completion = Completion(
            s.sample_id, s.response, s.logprobs, s.top_ids, s.top_logprobs, s.routing, FinishReason.STOP, 0
        )
        verdict = Verdict(i % 2, None, GradeReason.CORRECT if i % 2 else GradeReason.WRONG)
        groups.setdefault(index, []).append(Sample(s.sample_id, prompt, completion, float(i % 2), verdict, index))
    return [Group(members[0].prompt, tuple(members)) for members in groups.values()]


@pytest.fixture
def recipe():
    return load_recipe("tiny", OVERRIDES)


def make_rollout(directory, seed):
    """Three groups of two different answers to the same prompt."""
    trainer = small_trainer()
    base = rollout(trainer, seed, count=3)
    samples = []
    for index, s in enumerate(base):
        for copy in range(2):
            length = len(s.response) - copy
            samples.append(
                dataclasses.replace(
                    s,
                    sample_id=f"1-{index}-{copy}",
                    response=s.response[:length],
                    logprobs=s.logprobs[:length],
                    top_ids=s.top_ids[:length],
                    top_logprobs=s.top_logprobs[:length],
                    routing=s.routing[: len(s.prompt) + length - 1],
                )
            )
    directory.mkdir()
    groups = as_groups(samples)
    write_groups(directory, groups)
    return groups


def worker(recipe, tmp_path):
    made = TrainWorker(recipe.model_dump_json(), str(tmp_path), str(MODEL), 0, 1, "")
    made.start()
    return made


def test_train_export_restore_and_train_again_give_the_same_adapter(tmp_path, recipe):
    make_rollout(tmp_path / "r1", 1)
    make_rollout(tmp_path / "r2", 2)
    first = worker(recipe, tmp_path)
    assert first.restore(None)["step"] == 0
    one = first.train(1, str(tmp_path / "r1"))
    json.dumps(one)
    assert first.step() == 1
    assert one["proof"].startswith("first step")
    for name in (
        "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "train/train_rollout_kl",
        "train/sc_correction", "train/sc_train_head_mass", "train/sc_rollout_head_mass", "train/sc_tail_ratio",
        "perf/train_time", "perf/actor_train_tflops", "memory/train_host_peak_mb",
    ):  # fmt: skip
        assert np.isfinite(one["metrics"][name]), name
    (tmp_path / "save").mkdir()
    exported = first.export(1, str(tmp_path / "save"), True)
    json.dumps(exported)
    assert exported["adapter_digest"] == one["adapter_digest"]
    assert exported["adapter_digest"] == digest_of_file(tmp_path / "save" / "adapter_model.safetensors")
    assert {entry["path"] for entry in exported["files"]} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "trainer_state.json",
        "optimizer/state-00001-of-00001.json",
        "optimizer/state-00001-of-00001.safetensors",
    }
    two = first.train(2, str(tmp_path / "r2"))
    assert two["adapter_digest"] != one["adapter_digest"]
    second = worker(recipe, tmp_path)
    assert second.restore(str(tmp_path / "save")) == {
        "step": 1,
        "restored": ["adapter", "step", "learning-rate schedule", "random state", "optimizer"],
        "not_restored": [],
    }
    assert second.train(2, str(tmp_path / "r2"))["adapter_digest"] == two["adapter_digest"]
    assert second.score([1, 2, 3, 4]) == first.score([1, 2, 3, 4])


def test_a_step_out_of_order_is_refused(tmp_path, recipe):
    made = TrainWorker(recipe.model_dump_json(), str(tmp_path), str(MODEL), 0, 1, "")
    with pytest.raises(StepOrderError, match="call `start` first"):
        made.step()
    made.start()
    made.restore(None)
    with pytest.raises(StepOrderError, match="step 3 was asked for, but 0 steps are in memory"):
        made.train(3, str(tmp_path))
    with pytest.raises(StepOrderError, match="step 1 was asked for"):
        made.export(1, str(tmp_path), False)
    made.close()
    made.close()


def test_advantages_are_those_of_the_group_without_aborted_answers(tmp_path, recipe):
    groups = make_rollout(tmp_path / "r", 3)
    plain = train_samples(groups, recipe, 1)
    assert [s.advantage for s in plain] == [-0.5, 0.5] * 3
    assert not any(s.masked for s in plain)
    assert np.array_equal(plain[0].prompt, groups[0].prompt.tokens)


def test_an_aborted_answer_is_masked_and_leaves_the_baseline(tmp_path, recipe):
    (group, *_) = make_rollout(tmp_path / "r", 3)
    third = dataclasses.replace(group.samples[0], sample_id="1-0-2", reward=1.0)
    third = dataclasses.replace(third, completion=dataclasses.replace(third.completion, finish=FinishReason.ABORT))
    samples = train_samples([dataclasses.replace(group, samples=(*group.samples, third))], recipe, 1)
    assert [(s.advantage, s.masked) for s in samples] == [(-0.5, False), (0.5, False), (0.0, True)]


def test_the_control_shuffles_within_groups(tmp_path, recipe):
    groups = make_rollout(tmp_path / "r", 4)
    control = load_recipe("tiny", [*OVERRIDES, "algorithm.shuffle_advantages=true"])
    seen = [tuple(s.advantage for s in train_samples(groups, control, step)) for step in range(12)]
    assert len(set(seen)) > 3
    assert all(sorted(values[i : i + 2]) == [-0.5, 0.5] for values in seen for i in (0, 2, 4))
    assert seen[0] == tuple(s.advantage for s in train_samples(groups, control, 0))
