"""The held-out set answered and graded: reported, never trained on, never a reason to stop. No torch.

The seeds of an evaluation do not depend on the step, so two evaluations of a run differ by the policy and not by the
luck of the draw.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from k31core.observe.jsonl import write_atomic
from k31core.recipe.algorithm import EvalRecipe
from k31core.recipe.recipe import Recipe
from k31core.rl.types import Completion, GenerateRequest, GradeReason, Prompt, SamplingParams, Verdict
from k31core.rollout.engine import Engine
from k31core.rollout.episode import gather_or_cancel, sample_seed
from k31core.rollout.reward import Rewarder

_UNFORMATTED = frozenset({GradeReason.NO_BOX, GradeReason.NO_THINK_END})


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What an evaluation asks for."""

    name: str
    samples: int
    params: SamplingParams
    """Its seed is replaced for every answer; nothing but tokens is recorded."""
    seed: int
    policy_version: int

    @staticmethod
    def of(recipe: Recipe, policy_version: int, stop_token_ids: tuple[int, ...]) -> "EvalPlan":
        """The evaluation as the recipe describes it; answers may be as long as in training."""
        params = SamplingParams(
            temperature=recipe.eval.temperature,
            top_p=1.0,
            top_k=0,
            max_new_tokens=recipe.rollout.max_response_tokens,
            stop_token_ids=stop_token_ids,
            seed=0,
        )
        return EvalPlan(recipe.eval.name, recipe.eval.samples_per_prompt, params, recipe.seed, policy_version)


@dataclass(frozen=True, slots=True)
class Answer:
    """One graded answer."""

    completion: Completion
    text: str
    reward: float
    verdict: Verdict

    @property
    def formatted(self) -> bool:
        """The training grader found an answer in it, right or wrong."""
        return (self.verdict.deepscaler_reason or self.verdict.reason) not in _UNFORMATTED


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Numbers for the log, rows for the table."""

    metrics: dict[str, float]
    table: list[dict[str, Any]]
    """One row a problem: id, row, label, right answers, truncated ones, mean length, the first answer's text."""


def table_file(run_dir: Path, settings: EvalRecipe, step: int, *, asked: bool) -> Path:
    """Where the table of an evaluation lies: one a step for the recipe's own, one for each way in which a user asked.

    `eval/heldout-step-00005.json`; asked for by hand, `eval/aime-2024-step-00005-n8-t0.7.json`.
    """
    how = f"-n{settings.samples_per_prompt}-t{settings.temperature:g}" if asked else ""
    return run_dir / "eval" / f"{settings.name}-step-{step:05d}{how}.json"


def write_table(path: Path, result: Evaluation, facts: Mapping[str, Any]) -> None:
    """The whole evaluation as JSON: `facts`, metrics, and one object a problem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "metrics": result.metrics, "problems": result.table}
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False).encode())


async def evaluate(plan: EvalPlan, engine: Engine, rewarder: Rewarder, prompts: Sequence[Prompt]) -> Evaluation:
    """Answer every prompt `plan.samples` times and grade. Raises ValueError for an empty set, engine errors as is."""
    if not prompts:
        raise ValueError(f"evaluation {plan.name}: the held-out set is empty")
    calls = [_answer(plan, engine, rewarder, prompt, index) for prompt in prompts for index in range(plan.samples)]
    flat = await gather_or_cancel(calls)
    by_prompt = [flat[i * plan.samples : (i + 1) * plan.samples] for i in range(len(prompts))]
    return Evaluation(_metrics(plan, by_prompt), [_row(p, a) for p, a in zip(prompts, by_prompt, strict=True)])


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased chance that one of k answers drawn from `samples` without replacement is right."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


async def _answer(plan: EvalPlan, engine: Engine, rewarder: Rewarder, prompt: Prompt, index: int) -> Answer:
    seed = sample_seed(plan.seed, 0, prompt.row, index, purpose="eval")
    name = f"eval-{plan.name}-{prompt.row}-{index}"
    request = GenerateRequest(name, prompt.tokens, replace(plan.params, seed=seed), plan.policy_version)
    completion = await engine.generate(request)
    reward, verdict = await rewarder.grade(completion, prompt.label)
    return Answer(completion, rewarder.codec.answer_text(completion), reward, verdict)


def _metrics(plan: EvalPlan, by_prompt: list[list[Answer]]) -> dict[str, float]:
    answers = [answer for group in by_prompt for answer in group]
    right = [sum(answer.reward > 0 for answer in group) for group in by_prompt]
    name = f"eval/{plan.name}"
    metrics = {
        name: float(np.mean([answer.reward for answer in answers])),
        f"{name}/problems": float(len(by_prompt)),
        f"{name}/truncated_ratio": float(np.mean([answer.completion.truncated for answer in answers])),
        f"{name}/format_ratio": float(np.mean([answer.formatted for answer in answers])),
        f"{name}/response_len/mean": float(np.mean([len(answer.completion.tokens) for answer in answers])),
    }
    for k in draws(plan.samples):
        metrics[f"{name}/pass@{k}"] = float(np.mean([pass_at_k(plan.samples, count, k) for count in right]))
    return metrics


def draws(samples: int) -> list[int]:
    """The k of pass@k: the powers of two up to the number of answers, and that number."""
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})


def _row(prompt: Prompt, answers: list[Answer]) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "row": prompt.row,
        "label": prompt.label,
        "right": sum(answer.reward > 0 for answer in answers),
        "samples": len(answers),
        "truncated": sum(answer.completion.truncated for answer in answers),
        "response_len_mean": float(np.mean([len(answer.completion.tokens) for answer in answers])),
        "reasons": [answer.verdict.reason.value for answer in answers],
        "first_answer": answers[0].text,
    }
