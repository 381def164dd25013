"""What a grader says about one answer, and how the graders' words become one verdict.

A verdict is 0 or 1 for each grader that ran, and the reason for it. A time-out, a crash and a refusal score 0 like a
wrong answer does, but never silently: the reason says which it was, so an audit can tell a weak policy from a weak
grader.
"""

from dataclasses import dataclass
from enum import StrEnum

from k31core.rl.types import GradeReason, Verdict


class GraderName(StrEnum):
    """The graders that a recipe or a command can name."""

    DEEPSCALER = "deepscaler"
    MATH_VERIFY = "math_verify"


FAULTS = frozenset({GradeReason.TIMED_OUT, GradeReason.GRADER_ERROR, GradeReason.REFUSED})
"""Reasons that speak of the grader, not of the answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one grader on one answer."""

    score: int
    """0 or 1."""
    reason: GradeReason


def grader_names(names: tuple[str, ...]) -> tuple[GraderName, ...]:
    """The graders that `names` mean, `both` standing for all of them, in order and without repeats.

    `math-verify` and `math_verify` are the same. Raises ValueError for an unknown name or an empty tuple.
    """
    found: list[GraderName] = []
    for name in names:
        key = str(name).replace("-", "_")
        if key not in {"both", *GraderName}:
            raise ValueError(f"unknown grader {name!r}: use 'deepscaler', 'math-verify' or 'both'")
        found.extend(GraderName if key == "both" else (GraderName(key),))
    if not found:
        raise ValueError("no grader named: use 'deepscaler', 'math-verify' or 'both'")
    return tuple(dict.fromkeys(found))


def combine(outcomes: dict[GraderName, Outcome]) -> Verdict:
    """One verdict from the outcomes of the graders that ran, the first of them being the one that trains."""
    first = next(iter(outcomes.values()))
    deepscaler, math_verify = outcomes.get(GraderName.DEEPSCALER), outcomes.get(GraderName.MATH_VERIFY)
    return Verdict(
        deepscaler=deepscaler.score if deepscaler else None,
        math_verify=math_verify.score if math_verify else None,
        reason=first.reason,
        deepscaler_reason=deepscaler.reason if deepscaler else None,
        math_verify_reason=math_verify.reason if math_verify else None,
    )


def reason_to_show(verdict: Verdict) -> GradeReason:
    """One reason for a reader of both scores: the first fault of any grader (it explains a 0), else `reason`."""
    reasons = (verdict.deepscaler_reason, verdict.math_verify_reason)
    return next((reason for reason in reasons if reason in FAULTS), verdict.reason)
