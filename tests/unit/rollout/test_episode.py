"""One rollout step: order, seeds, dynamic sampling, states, the token budget, faults."""

import asyncio
from types import SimpleNamespace

import pytest

from k31core.rl.types import GradeReason, PromptState, Verdict
from k31core.rollout.episode import NothingToLearnError, draw_prompts, run_step, sample_seed
from k31core.rollout.reward import audit
from k31core.rollout.step_metrics import step_metrics
from tests.unit.rollout.scripted import LabelSource, ScriptedEngine, ScriptedGrader, plan, rewarder


def step(labels, engine=None, cursor=None, grader=None, **fields):
    grader = grader or ScriptedGrader()
    return asyncio.run(
        run_step(plan(**fields), engine or ScriptedEngine(), rewarder(grader), LabelSource(labels), cursor)
    )


def test_groups_in_order_whatever_finishes_first():
    engine = ScriptedEngine()
    result = step(["10", "00", "01"], engine, groups=3)
    assert engine.seen == ["3-0-0", "3-0-1", "3-1-0", "3-1-1", "3-2-0", "3-2-1"]
    assert [group.rewards for group in result.groups] == [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
    assert [s.sample_id for g in result.groups for s in g.samples] == engine.seen
    assert all(s.completion.policy_version == 2 for g in result.groups for s in g.samples)
    assert [d.state for d in result.drawn] == [PromptState.TRAINED] * 3
    assert result.cursor == {"source": 3, "requeued": []}


def test_grading_runs_beside_generation():
    """The last answer ends only when the first has been graded: a step that graded afterwards would hang."""
    graded = asyncio.Event()

    class Engine(ScriptedEngine):
        async def generate(self, request):
            if request.request_id == "3-1-1":
                await asyncio.wait_for(graded.wait(), timeout=10)
            return await super().generate(request)

    class Grader(ScriptedGrader):
        async def grade(self, response, label, **options):
            if response == "3-0-0":
                graded.set()
            return await super().grade(response, label, **options)

    assert len(step(["10"], Engine(), grader=Grader()).groups) == 2


def test_seeds_are_distinct_and_repeatable():
    first, second = ScriptedEngine(), ScriptedEngine()
    step(["10"], first, groups=4, samples=2)
    step(["10"], second, groups=4, samples=2)
    assert first.seeds == second.seeds and len(set(first.seeds)) == 8
    everywhere = {sample_seed(r, s, g, i) for r in range(3) for s in range(4) for g in range(5) for i in range(6)}
    assert len(everywhere) == 360
    assert sample_seed(0, 1, 2, 3) != sample_seed(0, 1, 2, 3, "eval")
    assert all(0 <= seed < 2**63 for seed in everywhere)


def test_dynamic_sampling_refills_until_enough_groups_differ():
    """Rows: same, differs, same | differs, differs: two refills of two; the last one is surplus."""
    labels = ["00", "10", "11", "00", "01", "10"]
    result = step(labels, groups=2, refill_groups=2, max_refills=5)
    assert [d.prompt.row for d in result.drawn] == [0, 1, 2, 3, 4, 5]
    assert [d.state.value for d in result.drawn] == ["dropped", "trained", "dropped", "dropped", "trained", "surplus"]
    assert result.refills == 2 and result.cursor["source"] == 6
    assert [g.prompt.row for g in result.groups] == [1, 4]
    metrics = step_metrics(result, seconds=2.0, devices=1)
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/raw_reward_unfiltered"] == pytest.approx(5 / 12)
    assert metrics["rollout/groups_dropped"] == 3 and metrics["rollout/groups_surplus"] == 1
    assert metrics["rollout/generated_tokens"] == 36 and metrics["perf/tokens_per_gpu_per_sec"] == 18
    assert metrics["rollout/groups_with_signal_ratio"] == 0.5
    assert metrics["reward/correct"] == 5 and metrics["reward/wrong"] == 7


def test_nothing_left_to_learn_ends_after_the_refills_and_says_why():
    with pytest.raises(NothingToLearnError) as caught:
        step(["11", "11", "11", "00"], groups=3, refill_groups=4, max_refills=2)
    text = str(caught.value)
    assert "0 of 3 groups" in text and "after 2 refills" in text and "of 11 finished groups 9 were all right" in text
    assert "2 all wrong" in text and "max_refills" in text


def test_without_dynamic_sampling_equal_groups_are_kept():
    result = step(["00"], groups=3)
    assert len(result.groups) == 3 and result.refills == 0


def test_token_budget_aborts_and_requeues():
    """Groups 1 and 3 hang; when group 0 and 2 have used the budget they are aborted and drawn first next time."""
    engine = ScriptedEngine(hold={"3-1-0", "3-3-1"})
    result = step(["10"], engine, groups=4, token_budget=18)
    assert [d.state.value for d in result.drawn] == ["trained", "requeued", "trained", "requeued"]
    assert [g.prompt.row for g in result.groups] == [0, 2]
    assert result.cursor == {"source": 4, "requeued": [{"row": 1, "epoch": 0}, {"row": 3, "epoch": 0}]}
    source = LabelSource(["10"])
    prompts, after = draw_prompts(source, result.cursor, 3)
    assert [p.row for p in prompts] == [1, 3, 4] and after == {"source": 5, "requeued": []}
    again = step(["10"], groups=3, cursor=result.cursor)
    assert [d.prompt.row for d in again.drawn] == [1, 3, 4]


def test_spent_budget_without_a_group_is_an_error():
    engine = ScriptedEngine(hold={"3-0-1", "3-1-1"})
    with pytest.raises(NothingToLearnError, match="token_budget_tokens"):
        step(["10"], engine, groups=2, token_budget=3)


def test_a_fault_cancels_the_rest():
    engine = ScriptedEngine(fail="3-1-0", hold={"3-0-0", "3-0-1"})
    with pytest.raises(RuntimeError, match="engine lost 3-1-0"):
        step(["10"], engine, groups=3)


def test_graders_named_by_the_recipe_and_truncation():
    """The training grader comes first; `truncated_is_zero` forces 0 but keeps the verdict; disagreement is counted."""
    grader = ScriptedGrader(second=1)
    result = step(["10"], grader=grader, groups=1)
    assert grader.asked[0][2] == ("deepscaler", "math_verify")
    assert step_metrics(result, seconds=1.0, devices=1)["reward/disagreement_rate"] == 0.5
    forced = asyncio.run(
        run_step(plan(groups=1), _Truncating(), rewarder(grader, truncated_is_zero=True), LabelSource(["11"]), None)
    )
    assert forced.groups[0].rewards == (0.0, 0.0)
    assert [s.verdict.deepscaler for s in forced.groups[0].samples] == [1, 1]
    metrics = step_metrics(forced, seconds=1.0, devices=1)
    assert metrics["rollout/truncated_ratio"] == 1.0 and metrics["reward/truncated"] == 2


def test_the_audit_tells_a_weak_policy_from_a_weak_grader():
    """Every reason has its own count, also when it is 0; time-outs and grader errors are never among the wrong ones."""
    reasons = ["correct", "wrong", "no_box", "timed_out", "timed_out", "grader_error"]
    samples = [
        SimpleNamespace(
            verdict=Verdict(deepscaler=int(reason == "correct"), math_verify=1, reason=GradeReason(reason)),
            completion=SimpleNamespace(truncated=reason == "no_box"),
        )
        for reason in reasons
    ]
    counts = audit(samples)
    expected = dict.fromkeys((f"reward/{reason.value}" for reason in GradeReason), 0.0)
    expected |= {"reward/correct": 1, "reward/wrong": 1, "reward/no_box": 1, "reward/timed_out": 2}
    expected |= {"reward/grader_error": 1, "reward/truncated": 1, "reward/disagreement_rate": 5 / 6}
    assert counts == expected


class _Truncating(ScriptedEngine):
    async def generate(self, request):
        from dataclasses import replace

        from k31core.rl.types import FinishReason

        return replace(await super().generate(request), finish=FinishReason.LENGTH)
