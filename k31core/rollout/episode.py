"""One rollout step: draw prompts, generate and grade their samples at the same time, keep enough groups to train on.
No torch.

    prompts ──► engine.generate (all samples of a round at once, in the order group, sample)
                    └──► rewarder.grade, as each sample finishes
    round done ──► keep groups (dynamic sampling: those whose rewards differ) ──► enough? else draw a refill of a few
    groups

Decisions are taken between rounds, on whole rounds in drawing order, so a step does not depend on which answer
finished first.
"""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from k31core.recipe.recipe import Recipe
from k31core.rl.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Prompt,
    PromptState,
    Sample,
    SamplingParams,
)
from k31core.rollout.engine import Engine
from k31core.rollout.reward import Rewarder


class NothingToLearnError(ValueError):
    """Dynamic sampling ran out of refills: says what the groups looked like."""


class PromptSource(Protocol):
    """Where prompts come from: a prepared data set."""

    def draw(self, cursor: Any, count: int) -> tuple[list[Prompt], Any]:
        """(the next `count` prompts, cursor after them); `cursor` None is the beginning. Cursors are JSON values."""
        ...

    def prompt(self, row: int, epoch: int) -> Prompt:
        """The prompt of a row, as drawn in `epoch`."""
        ...


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step asks for."""

    step: int
    policy_version: int
    groups: int
    """Groups to train on."""
    samples: int
    """Of each group."""
    params: SamplingParams
    """Its seed is replaced for every sample."""
    seed: int
    """Of the run."""
    refill_groups: int | None
    """Dynamic sampling: groups drawn at a time when too few are left; None keeps every group."""
    max_refills: int = 0
    token_budget: int | None = None
    """Generated tokens after which the step is cut short."""

    def keeps(self, group: Group) -> bool:
        """Whether a finished group is worth training on."""
        return self.refill_groups is None or has_signal(group)

    @staticmethod
    def of(recipe: Recipe, step: int, policy_version: int, stop_token_ids: tuple[int, ...]) -> "StepPlan":
        """The step as the recipe describes it."""
        rollout, dynamic = recipe.rollout, recipe.rollout.dynamic_sampling
        return StepPlan(
            step=step,
            policy_version=policy_version,
            groups=rollout.prompts_per_step,
            samples=rollout.samples_per_prompt,
            params=SamplingParams(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_new_tokens=rollout.max_response_tokens,
                stop_token_ids=stop_token_ids,
                seed=0,
                top_logprobs_num=rollout.top_logprobs_num,
                return_routing=rollout.routing_replay,
                return_selection=rollout.indexer_replay,
            ),
            seed=recipe.seed,
            refill_groups=None if dynamic is None else dynamic.refill_groups,
            max_refills=0 if dynamic is None else dynamic.max_refills,
            token_budget=rollout.token_budget_tokens,
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt drawn in the step and how it ended."""

    prompt: Prompt
    group: int
    state: PromptState
    rewards: tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """The line of the prompt ledger."""
        return {
            "prompt_id": self.prompt.prompt_id,
            "row": self.prompt.row,
            "epoch": self.prompt.epoch,
            "group": self.group,
            "state": self.state.value,
            "rewards": list(self.rewards),
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything a step produced."""

    groups: tuple[Group, ...]
    """To train on, in drawing order."""
    finished: tuple[Group, ...]
    """Every group whose samples all finished, in drawing order."""
    drawn: tuple[Drawn, ...]
    """Each prompt drawn, once."""
    cursor: Any
    refills: int


async def run_step(plan: StepPlan, engine: Engine, rewarder: Rewarder, source: PromptSource, cursor: Any) -> StepResult:
    """Draw, generate and grade one step from `cursor` on.

    A step that reaches its token budget aborts what still runs: those prompts are re-queued (the next step draws them
    first) and it makes do with the groups it has. Raises NothingToLearnError when there is none, or when
    `max_refills` refills did not give enough; engine and grader errors as they are, with everything else of the step
    cancelled.
    """
    budget = TokenBudget(plan.token_budget, engine)
    outcomes: list[tuple[Prompt, Group | None]] = []
    count, refills = plan.groups, 0
    while True:
        prompts, cursor = draw_prompts(source, cursor, count)
        first = len(outcomes)
        calls = [_group(plan, first + i, prompt, rewarder, budget) for i, prompt in enumerate(prompts)]
        outcomes += zip(prompts, await gather_or_cancel(calls), strict=True)
        useful = [i for i, (_, group) in enumerate(outcomes) if group and plan.keeps(group)]
        if len(useful) >= plan.groups or (useful and budget.spent):
            break
        if plan.refill_groups is None or refills == plan.max_refills or budget.spent:
            finished = [group for _, group in outcomes if group]
            raise NothingToLearnError(_nothing_to_learn(plan, finished, len(useful), refills))
        count, refills = plan.refill_groups, refills + 1
    return _result(plan, outcomes, useful, cursor, refills)


def _result(
    plan: StepPlan, outcomes: list[tuple[Prompt, Group | None]], useful: list[int], cursor: Any, refills: int
) -> StepResult:
    trained, surplus = set(useful[: plan.groups]), set(useful[plan.groups :])
    drawn = []
    for i, (prompt, group) in enumerate(outcomes):
        state = PromptState.DROPPED
        if group is None:
            state = PromptState.REQUEUED
        elif i in trained or i in surplus:
            state = PromptState.TRAINED if i in trained else PromptState.SURPLUS
        drawn.append(Drawn(prompt, i, state, group.rewards if group else ()))
    requeued = [{"row": d.prompt.row, "epoch": d.prompt.epoch} for d in drawn if d.state is PromptState.REQUEUED]
    return StepResult(
        groups=tuple(group for i, (_, group) in enumerate(outcomes) if group and i in trained),
        finished=tuple(group for _, group in outcomes if group),
        drawn=tuple(drawn),
        cursor={**cursor, "requeued": [*requeued, *cursor["requeued"]]},
        refills=refills,
    )


def draw_prompts(source: PromptSource, cursor: Any, count: int) -> tuple[list[Prompt], dict[str, Any]]:
    """(the next `count` prompts, re-queued ones first; the cursor `{"source": .., "requeued": [..]}` after them)."""
    cursor = cursor or {"source": None, "requeued": []}
    waiting = cursor["requeued"]
    again = [source.prompt(entry["row"], entry["epoch"]) for entry in waiting[:count]]
    fresh, after = source.draw(cursor["source"], count - len(again))
    return [*again, *fresh], {"source": after, "requeued": waiting[count:]}


class TokenBudget:
    """Counts the generated tokens of a step; when they reach the limit, what still runs is aborted."""

    def __init__(self, limit: int | None, engine: Engine) -> None:
        self._limit, self._engine = limit, engine
        self._running: set[str] = set()
        self._used = 0

    @property
    def spent(self) -> bool:
        """The limit is reached."""
        return self._limit is not None and self._used >= self._limit

    async def generate(self, request: GenerateRequest) -> Completion | None:
        """The completion; None when it was aborted, or not begun because the budget was spent."""
        if self.spent:
            return None
        self._running.add(request.request_id)
        try:
            completion = await self._engine.generate(request)
        finally:
            self._running.discard(request.request_id)
        was_spent = self.spent
        self._used += len(completion.tokens)
        if self.spent and not was_spent:
            await self._engine.abort(tuple(sorted(self._running)))
        return None if completion.finish is FinishReason.ABORT else completion


def has_signal(group: Group) -> bool:
    """Rewards of the group differ, so some advantage is not zero."""
    return len(set(group.rewards)) > 1


def sample_seed(run_seed: int, step: int, group: int, sample: int, purpose: str = "rollout") -> int:
    """63-bit seed of one sample: a hash of where it stands, so neighbours and steps share nothing."""
    text = f"{purpose}:{run_seed}:{step}:{group}:{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


async def gather_or_cancel[T](calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first error cancels the rest, waits until they have ended, and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _group(plan: StepPlan, group: int, prompt: Prompt, rewarder: Rewarder, budget: TokenBudget) -> Group | None:
    """The group; None when one of its samples was aborted."""
    calls = [_sample(plan, group, index, prompt, rewarder, budget) for index in range(plan.samples)]
    samples = await gather_or_cancel(calls)
    complete = tuple(sample for sample in samples if sample is not None)
    return Group(prompt, complete) if len(complete) == len(samples) else None


async def _sample(
    plan: StepPlan, group: int, index: int, prompt: Prompt, rewarder: Rewarder, budget: TokenBudget
) -> Sample | None:
    name = f"{plan.step}-{group}-{index}"
    params = replace(plan.params, seed=sample_seed(plan.seed, plan.step, group, index))
    completion = await budget.generate(GenerateRequest(name, prompt.tokens, params, plan.policy_version))
    if completion is None:
        return None
    reward, verdict = await rewarder.grade(completion, prompt.label)
    return Sample(name, prompt, completion, reward, verdict, group)


def _nothing_to_learn(plan: StepPlan, finished: list[Group], useful: int, refills: int) -> str:
    means = [sum(group.rewards) / len(group.rewards) for group in finished]
    same = [mean for mean, group in zip(means, finished, strict=True) if not has_signal(group)]
    right, wrong = sum(mean > 0 for mean in same), sum(mean <= 0 for mean in same)
    cut = [sample.completion.truncated for group in finished for sample in group.samples]
    return (
        f"step {plan.step}: {useful} of {plan.groups} groups have differing rewards after {refills} refills "
        f"(limit {plan.max_refills}): of {len(finished)} finished groups {right} were all right and {wrong} all wrong, "
        f"mean reward {sum(means) / max(len(means), 1):.3f}, {sum(cut) / max(len(cut), 1):.0%} of answers truncated. "
        "All right: the data set has nothing left to teach. All wrong: check grader, labels and "
        "rollout.max_response_tokens. To go on, raise rollout.dynamic_sampling.max_refills or "
        "rollout.samples_per_prompt, raise rollout.token_budget_tokens if it is set, or switch dynamic sampling off"
    )
