"""Verdicts on answers with known ones: the shipped cases, and more measured on the public implementations.

Two files hold what the public deepscaler grader (with pylatexenc 2.10 and sympy 1.14) and math-verify 0.9.0 (text after
the thinking against the boxed label) said on 2026-11-30: `measured_verdicts.json` on answers that touch every rule,
`near_cases.json` on answers written by hand beside the shipped ones: units, degrees, percent, separators, mixed
numbers, intervals, sets, signs, several boxes, broken thinking.
"""

import json
from pathlib import Path

import pytest

from k31core.grading.deepscaler import Unsettled, grade_by_rules
from k31core.grading.extract import last_box, solution_segment
from k31core.grading.latex_text import LatexTextError, latex_to_text
from k31core.grading.limits import MAX_BOX_CHARS
from k31core.grading.mathd import normalise_mathd
from k31core.grading.normal_form import normalise_loose, parts_of
from k31core.grading.pool import GraderPool
from k31core.rl.types import GradeReason

CASES = Path(__file__).parents[2] / "cases" / "deepscaler.json"
MEASURED = Path(__file__).with_name("measured_verdicts.json")
NEAR = Path(__file__).with_name("near_cases.json")


@pytest.mark.parametrize("source", [CASES, MEASURED, NEAR], ids=lambda path: path.stem)
def test_verdicts_are_the_measured_ones(source: Path) -> None:
    cases = json.loads(source.read_text())
    with GraderPool(workers=2, wall_limit_s=30) as pool:
        verdicts = pool.grade_many([(case["response"], case["label"]) for case in cases], graders=("both",))
        assert (pool.kills, pool.crashes) == (0, 0)
    wrong = [
        (case, verdict)
        for case, verdict in zip(cases, verdicts, strict=True)
        if (verdict.deepscaler, verdict.math_verify) != (case["deepscaler"], case["math_verify"])
    ]
    assert not wrong
    assert sum(case["deepscaler"] for case in cases) >= 10 <= sum(1 - case["deepscaler"] for case in cases)


@pytest.mark.parametrize(
    ("response", "label", "reason"),
    [
        ("x</think>\\boxed{34}", "34", GradeReason.CORRECT),
        ("x</think>\\boxed{35}", "34", GradeReason.WRONG),
        ("\\boxed{34}", "34", GradeReason.NO_THINK_END),
        ("x</think>34", "34", GradeReason.NO_BOX),
        ("x</think>\\boxed{34", "34", GradeReason.NO_BOX),
        ("x</think>\\boxed{" + "3" * (MAX_BOX_CHARS + 1) + "}", "34", GradeReason.REFUSED),
        ("x</think>\\boxed{x+9**9**9}", "x+1", GradeReason.REFUSED),
        ("x</think>\\boxed{" + "(" * 200 + "x" + ")" * 200 + "}", "x+1", GradeReason.REFUSED),
    ],
)
def test_the_reason_tells_what_happened(response: str, label: str, reason: GradeReason) -> None:
    outcome = grade_by_rules(response, label)
    assert not isinstance(outcome, Unsettled)
    assert (outcome.score, outcome.reason) == (int(reason is GradeReason.CORRECT), reason)


def test_only_algebra_with_roots_or_letters_needs_a_worker() -> None:
    for answer, label in (("0.5", "1/2"), ("7/4", "1.75"), ("2^3*3", "48/2"), ("x+1", "x+1"), ("2/4", "1/2")):
        assert not isinstance(grade_by_rules(f"x</think>\\boxed{{{answer}}}", label), Unsettled)
    assert isinstance(grade_by_rules("x</think>\\boxed{1+x}", "x+1"), Unsettled)


def test_extraction() -> None:
    assert solution_segment("a</think>b</think>c") == "c"
    assert solution_segment("a###Responseb###Responsec") == "b"
    assert solution_segment("a") is None
    assert last_box("\\boxed{1} \\boxed{a{b}c} d}") == "a{b}c"
    assert last_box("\\boxed{1} \\boxed 2") is None
    assert last_box("\\boxed{" * 3 + "1" + "}" * 3) == "1"
    assert last_box("\\boxed{1} \\boxed{2") is None


def test_normal_forms() -> None:
    assert normalise_mathd("\\dfrac12") == normalise_mathd("1/2") == "\\frac{1}{2}"
    assert normalise_mathd("\\text{ 5 }") == "5"
    assert normalise_mathd("x = 5\\%") == "5"
    assert normalise_mathd("\\sqrt") == "\\sqrt"  # unreadable: as it is
    assert normalise_loose("1,234,567") == "1234567"
    assert normalise_loose("-7\\frac{3}{4}") == "-7+3/4"
    assert normalise_loose("2 million") == "2*10^6"
    assert normalise_loose("1_000") == "1000"
    assert parts_of("(1,2)") == ["1", "2"]
    assert parts_of("1,2") == ["1,2"]
    assert parts_of("1,234") == ["1234"]


def test_latex_as_text() -> None:
    assert latex_to_text("\\frac{\\sqrt{3}}{2}") == "√(3)/2"
    assert latex_to_text("\\foo{x}") == "x"
    assert latex_to_text("\\frac12") == "1/2" != latex_to_text("\\frac{1}")
    assert latex_to_text("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}") == "[ 1 2; 3 4 ]"
    assert latex_to_text("\\input{/etc/passwd}5") == "5"
    assert latex_to_text("34 \\") == "34" and latex_to_text("\\") == ""
    for broken in ("\\verb\\a\\\\", "\\sqrt", "{" * 100):
        with pytest.raises(LatexTextError):
            latex_to_text(broken)
