"""The deepscaler verdict: where the answer is, then string equality, then equality of numbers and algebra.

Order of the rules (`docs/grading.md` tells them with examples):

1. The text after the last `</think>`, else the segment after `###Response`, else 0.
2. The inside of the last brace-matched `\\boxed{}`, else 0.
3. Equal after the MATH normalisation (`mathd.py`): 1.
4. Equal after the loose normalisation (`normal_form.py`): 1.
5. Element by element (tuples and intervals in brackets, otherwise one element): two fractions must agree as strings; a
   whole number is only equal to a whole number that is spelled alike, so `10^2` is not `100`; everything else is
   compared as algebra, if it has at most two different letters and no large exponents.

All of it runs where the pool runs, within bounds of length; only algebra with roots, letters or large numbers is left
to a worker, as `Unsettled`. The verdict knows nothing of truncation.
"""

from dataclasses import dataclass

from k31core.grading.algebra import NotAlgebra, TooLarge, read_algebra, worth_reading
from k31core.grading.exact import check_size, exactly_equal
from k31core.grading.extract import BOX, last_box, solution_segment
from k31core.grading.limits import MAX_BOX_CHARS
from k31core.grading.mathd import normalise_mathd
from k31core.grading.normal_form import is_fraction, is_whole_number, normalise_loose, parts_of
from k31core.grading.verdict import Outcome
from k31core.rl.types import GradeReason

_CORRECT = Outcome(1, GradeReason.CORRECT)
_WRONG = Outcome(0, GradeReason.WRONG)
_REFUSED = Outcome(0, GradeReason.REFUSED)


@dataclass(frozen=True, slots=True)
class Unsettled:
    """Pairs (truth, answer) of expressions that must all be equal, for a worker to decide."""

    pairs: tuple[tuple[str, str], ...]


def grade_by_rules(response: str, label: str) -> Outcome | Unsettled:
    """The verdict as far as strings and small numbers decide it."""
    segment = solution_segment(response)
    if segment is None:
        return Outcome(0, GradeReason.NO_THINK_END)
    answer = last_box(segment)
    if answer is None:
        return Outcome(0, GradeReason.NO_BOX)
    truth = _truth_of(label)
    if truth is None:
        return _WRONG
    if max(len(answer), len(truth)) > MAX_BOX_CHARS:
        return _REFUSED
    if normalise_mathd(truth) == normalise_mathd(answer):
        return _CORRECT
    return _compare_loosely(normalise_loose(truth), normalise_loose(answer))


def _truth_of(label: str) -> str | None:
    """The label, or the inside of its box."""
    if not label:
        return None
    if BOX in label or "\\fbox" in label:
        return last_box(label)
    return label


def _compare_loosely(truth: str, answer: str) -> Outcome | Unsettled:
    if truth == answer:
        return _CORRECT
    if not answer or not truth:
        return _WRONG
    truth_parts, answer_parts = parts_of(truth), parts_of(answer)
    brackets_differ = truth[0] != answer[0] or truth[-1] != answer[-1]
    if len(truth_parts) != len(answer_parts) or (len(truth_parts) > 1 and brackets_differ):
        return _WRONG
    unsettled = []
    for truth_part, answer_part in zip(truth_parts, answer_parts, strict=True):
        try:
            equal = _parts_equal(truth_part, answer_part)
        except TooLarge:
            return _REFUSED
        if equal is None:
            unsettled.append((truth_part, answer_part))
        elif not equal:
            return _WRONG
    return Unsettled(tuple(unsettled)) if unsettled else _CORRECT


def _parts_equal(truth: str, answer: str) -> bool | None:
    """Whether two elements are equal; None when only a worker can tell. Raises TooLarge."""
    if is_fraction(truth) and is_fraction(answer):
        return truth == answer
    if is_whole_number(truth) != is_whole_number(answer) or not worth_reading(truth, answer):
        return False
    try:
        truth_tree, answer_tree = read_algebra(truth), read_algebra(answer)
    except NotAlgebra:
        return False
    check_size(truth_tree)
    check_size(answer_tree)
    if truth == answer or truth_tree == answer_tree:
        return True
    return exactly_equal(truth_tree, answer_tree)
