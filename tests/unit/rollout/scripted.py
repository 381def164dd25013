"""A scripted engine, grader and data set: the control flow of a step without a model."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from k31core.recipe.algorithm import RewardRecipe
from k31core.rl.types import Completion, FinishReason, GradeReason, Prompt, SamplingParams, Verdict
from k31core.rollout.episode import StepPlan
from k31core.rollout.reward import Rewarder

PARAMS = SamplingParams(1.0, 1.0, 0, 4, (2,), seed=0, top_logprobs_num=0)


@dataclass
class ScriptedEngine:
    """Answers with `lengths` tokens (the seed's last bits in the first), the later ones of a step first."""

    length: int = 3
    hold: set[str] = field(default_factory=set)
    """Requests that run until they are aborted."""
    seen: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    fail: str | None = None

    async def generate(self, request):
        self.seen.append(request.request_id)
        self.seeds.append(request.params.seed)
        _, group, index = map(int, request.request_id.split("-"))
        for _ in range(50 - 3 * group - index):
            await asyncio.sleep(0)
        if request.request_id == self.fail:
            raise RuntimeError(f"engine lost {request.request_id}")
        while request.request_id in self.hold and request.request_id not in self.aborted:
            await asyncio.sleep(0)
        aborted = request.request_id in self.aborted
        tokens = np.arange(1 if aborted else self.length, dtype=np.int32)
        finish = FinishReason.ABORT if aborted else FinishReason.STOP
        empty = np.zeros((len(tokens), 0))
        return Completion(
            request.request_id,
            tokens,
            np.zeros(len(tokens), np.float32),
            empty.astype(np.int32),
            empty.astype(np.float32),
            None,
            finish,
            request.policy_version,
        )

    async def abort(self, request_ids):
        self.aborted.update(request_ids)


class NumberCodec:
    """Text of an answer: its request id."""

    def answer_text(self, completion):
        return completion.request_id


@dataclass
class ScriptedGrader:
    """The label is the string of a group's rewards: sample i gets digit i."""

    asked: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    second: int | None = None

    async def grade(self, response, label, *, graders=("deepscaler",)):
        self.asked.append((response, label, graders))
        score = int(label[int(response.split("-")[2])])
        reason = GradeReason.CORRECT if score else GradeReason.WRONG
        return Verdict(score if "deepscaler" in graders else None, self.second, reason)


@dataclass
class LabelSource:
    """Row n has `labels[n % len]`; the cursor counts rows."""

    labels: list[str]

    def prompt(self, row, epoch):
        return Prompt(f"p{row}", (1, row), self.labels[row % len(self.labels)], row, epoch)

    def draw(self, cursor, count):
        start = cursor or 0
        return [self.prompt(row, 0) for row in range(start, start + count)], start + count


def rewarder(grader, **recipe):
    return Rewarder(grader, NumberCodec(), RewardRecipe(**recipe))


def plan(**fields):
    base = {
        "step": 3,
        "policy_version": 2,
        "groups": 2,
        "samples": 2,
        "params": PARAMS,
        "seed": 11,
        "refill_groups": None,
        "max_refills": 0,
    }
    return StepPlan(**(base | fields))
