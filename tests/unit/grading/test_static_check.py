"""What is refused before math-verify sees it, and what must not be."""

import time

import pytest

from k31core.grading.algebra import NotAlgebra, TooLarge, read_algebra
from k31core.grading.deepscaler import Unsettled, grade_by_rules
from k31core.grading.exact import check_size, exactly_equal
from k31core.grading.static_check import refusal
from tests.unit.grading.hostile import LARGE, NESTED


@pytest.mark.parametrize(
    "text",
    [
        *(
            "2^{10}",
            "2^{1000}",
            "x^{2024}",
            "10^{100}",
            "(1+x)^{100}",
            "2^{3^4}",
            "2^{2^{10}}",
            "5!",
            "100!",
            "(3!)!",
            "3!!",
        ),
        *(
            "e^{i\\pi}",
            "\\frac{1}{2^{n}}",
            "\\sqrt{\\frac{a}{b}}",
            "[0,1)\\cup(2,3]",
            "1,000,000",
            "x^{-1}",
            "2^{-1/2}",
        ),
        *("Step 1) and 2) and 3) give 34! So 34.", "\\boxed{n!}", "10^{10^{3}}"),
    ],
)
def test_ordinary_answers_pass(text: str) -> None:
    assert refusal(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9^{9^{9^9}}", "tower"),
        ("9**9**9**9", "tower"),
        ("9^{99999999}", "exponent"),
        ("2^{2^{40}}", "exponent"),
        ("(x+1)^{50000}", "exponent"),
        ("100000!", "factorial"),
        ("(10!)!", "factorial of"),
        ("((3!)!)!", "factorial of"),
        ("5!!!", "factorial of"),
        ("(" * 100 + ")" * 100, "nested"),
        ("9" * 3000, "digits"),
        ("x" * 70_000, "characters"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(text: str, reason: str) -> None:
    assert reason in str(refusal(text))


def test_the_work_before_any_limit_is_small() -> None:
    # Strings are handled in the caller's process, where no limit applies: a quadratic step would show here.
    patterns = [
        (piece * 10_000)[:9_900] for piece in ("1 ", "- ", "1,000,", "^ ", "cm ", "\\frac", "\\sqrt", "{", "}", "(")
    ]
    for answer in (*LARGE, *NESTED, *patterns):
        started = time.process_time()
        grade_by_rules(f"x</think>\\boxed{{{answer}}}", "x+1")
        refusal(answer)
        assert time.process_time() - started < 0.3, answer[:30]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2x", "2*x"),
        ("ab", "a*b"),
        ("3(x+1)", "3*(x+1)"),
        ("(a)(b)", "a*b"),
        ("-x^2", "-(x^2)"),
        ("2^-1", "2^(-1)"),
        ("2^3^x", "2^(3^x)"),
        ("x!^2", "(x!)^2"),
        ("1/2x", "(1/2)*x"),
        ("2sqrt(3)", "2*sqrt(3)"),
        ("x**2", "x^2"),
        ("--x", "x"),
    ],
)
def test_algebra_has_the_precedence_of_python(text: str, same: str) -> None:
    assert read_algebra(text) == read_algebra(same)


@pytest.mark.parametrize(
    "text", ["", "(", ")", "x+", "x=1", "x<1", "1,2", "x.y", "'x'", "re(x)", "007", "0x1f", "x y]", "±2"]
)
def test_no_algebra(text: str) -> None:
    with pytest.raises(NotAlgebra):
        read_algebra(text)


@pytest.mark.parametrize("text", ["9^9^9", "(9^9)^(9^9)", "99999!", "x^9999999", "10^99999*10^99999", "1e999999"])
def test_sizes_are_bounded_before_anything_is_computed(text: str) -> None:
    with pytest.raises(TooLarge):
        check_size(read_algebra(text))


@pytest.mark.parametrize(
    ("truth", "given", "equal"),
    [
        ("1/2", "0.5", True),
        ("1/3", "0.333333", False),
        ("7+3/4", "31/4", True),
        ("2^10", "1024", True),
        ("5!", "120", True),
        ("1/0", "1/0", False),
        ("0.1+0.2", "0.3", None),
        ("sqrt(4)", "2", None),
        ("2^99999", "2^99998", None),
    ],
)
def test_small_numbers_are_compared_exactly(truth: str, given: str, equal: bool | None) -> None:
    assert exactly_equal(read_algebra(truth), read_algebra(given)) is equal


def test_what_is_left_to_a_worker() -> None:
    pairs = Unsettled((("x+1", "1+x"), ("2x", "x*2")))
    assert grade_by_rules("x</think>\\boxed{(1+x, x*2)}", "(x+1,2x)") == pairs


def test_broken_nested_fractions_take_linear_time() -> None:
    # Going back to read a fraction without its second argument again doubled the work at each level.
    for answer in (
        "\\frac{" * 40 + "1" + "}" * 40,
        "\\frac{1}{\\frac{x" * 20 + "}" * 40,
        "\\sqrt{\\frac{x" * 20 + "}" * 40,
    ):
        started = time.process_time()
        grade_by_rules(f"x</think>\\boxed{{{answer}}}", "\\sqrt{2}")
        assert time.process_time() - started < 0.3
