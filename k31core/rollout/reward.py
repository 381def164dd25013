"""From an answer to its reward, and the audit counts that show what the graders saw. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from k31core.recipe.algorithm import RewardRecipe
from k31core.rl.types import Completion, GradeReason, Sample, Verdict
from k31core.rollout.text import TextCodec


class Grader(Protocol):
    """What grades an answer: `k31core.grading.pool.GraderPool`."""

    async def grade(self, response: str, label: str, *, graders: tuple[str, ...] = ...) -> Verdict:
        """The verdict of the named graders; the first of them trains."""
        ...


@dataclass(frozen=True, slots=True)
class Rewarder:
    """Grades completions as the recipe says."""

    grader: Grader
    codec: TextCodec
    recipe: RewardRecipe

    async def grade(self, completion: Completion, label: str) -> tuple[float, Verdict]:
        """(reward, verdict). A truncated answer is still graded (for the audit), and scores 0 if the recipe says so."""
        names = (self.recipe.grader, self.recipe.audit_grader)
        graders = tuple(dict.fromkeys(name for name in names if name is not None))
        verdict = await self.grader.grade(self.codec.answer_text(completion), label, graders=graders)
        score = verdict.deepscaler if self.recipe.grader == "deepscaler" else verdict.math_verify
        if score is None:
            raise RuntimeError(f"grader {self.recipe.grader} gave no score: verdict {verdict}")
        if completion.truncated and self.recipe.truncated_is_zero:
            score = 0
        return float(score), verdict


def audit(samples: Iterable[Sample]) -> dict[str, float]:
    """Counts of every finished answer by what the training grader saw, `reward/<reason>`, and how often the graders
    differ.

    `reward/truncated` counts answers cut at the limit whatever their reason. `reward/disagreement_rate` is over
    answers that both graders scored; it is absent without a second grader.
    """
    samples = list(samples)
    reasons = Counter(sample.verdict.reason for sample in samples)
    counts = {f"reward/{reason.value}": float(reasons[reason]) for reason in GradeReason}
    counts["reward/truncated"] = float(sum(sample.completion.truncated for sample in samples))
    both = [s.verdict for s in samples if s.verdict.deepscaler is not None and s.verdict.math_verify is not None]
    if both:
        counts["reward/disagreement_rate"] = sum(v.deepscaler != v.math_verify for v in both) / len(both)
    return counts
