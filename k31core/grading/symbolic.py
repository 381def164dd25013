"""Equality of two expressions with roots, letters or large numbers. Imports sympy: workers only.

The expressions come as text and are read by `algebra.py`; sympy objects are built node by node. No text reaches sympy
except digits and the names of letters, so nothing of an answer is ever parsed or evaluated by sympy or Python.
"""

from operator import add, mul, pow, sub, truediv

import mpmath  # type: ignore[import-untyped]
import sympy

from k31core.grading.algebra import Binary, Call, Name, Node, NotAlgebra, Number, TooLarge, read_algebra
from k31core.grading.exact import check_size
from k31core.grading.verdict import Outcome
from k31core.rl.types import GradeReason

_POINTS = (("0.7316", "0.2913"), ("-1.3871", "0.8459"), ("2.2361", "-0.5772"))
"""Where letters are put to see that two expressions differ: nothing special happens at these complex numbers."""

_DIGITS = 30

_APPLY = {"+": add, "-": sub, "*": mul, "/": truediv, "^": pow}
"""What each operator of a parsed expression does, to sympy objects and to numbers alike."""


def grade_pairs(pairs: list[tuple[str, str]]) -> Outcome:
    """1 when every pair (truth, answer) is equal. Size limits are checked again: a worker trusts nobody."""
    for truth_text, answer_text in pairs:
        try:
            truth, answer = read_algebra(truth_text), read_algebra(answer_text)
            check_size(truth)
            check_size(answer)
        except TooLarge:
            return Outcome(0, GradeReason.REFUSED)
        except NotAlgebra:
            return Outcome(0, GradeReason.WRONG)
        if not _equal(truth, answer):
            return Outcome(0, GradeReason.WRONG)
    return Outcome(1, GradeReason.CORRECT)


def _equal(truth: Node, answer: Node) -> bool:
    """What deepscaler asks: does sympy simplify the difference to zero?"""
    try:
        difference = build(truth) - build(answer)
        if difference == 0:
            return True
        if _differ_somewhere(truth, answer):
            return False
        return bool(sympy.simplify(difference) == 0)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError, RecursionError):
        return False  # sympy gives up in any of these ways; deepscaler counts that as unequal


def build(node: Node) -> sympy.Expr:
    """The sympy expression of a tree."""
    match node:
        case Number(text=text):
            return sympy.Integer(int(text)) if node.is_integer else sympy.Float(text)
        case Name(text=text):
            if node.imaginary_unit:
                return sympy.I
            return {"pi": sympy.pi, "oo": sympy.oo}.get(text) or sympy.Symbol(text)
        case Call(function=function, argument=argument):
            value = build(argument)
            if function == "neg":
                return -value
            return getattr(sympy, {"ln": "log"}.get(function, function))(value)
        case Binary(operator=operator, left=left, right=right):
            return _APPLY[operator](build(left), build(right))


def _differ_somewhere(truth: Node, answer: Node) -> bool:
    """True when the two clearly differ in numbers at some point; False proves nothing.

    It saves `simplify`, the slow step, for the answers that are right.
    """
    with mpmath.workdps(_DIGITS):
        for shift, point in enumerate(_POINTS):
            try:
                a, b = _number(truth, point, shift), _number(answer, point, shift)
                scale, distance = abs(a) + abs(b), abs(a - b)
            except (ArithmeticError, ValueError, TypeError, NotImplementedError):
                continue
            if mpmath.isfinite(scale) and mpmath.isfinite(distance) and distance > scale * mpmath.mpf("1e-12"):
                return True
    return False


def _number(node: Node, point: tuple[str, str], shift: int) -> mpmath.mpc:
    match node:
        case Number(text=text):
            return mpmath.mpc(mpmath.mpf(text))
        case Name(text=text):
            if node.imaginary_unit:
                return mpmath.mpc(0, 1)
            if text == "pi":
                return mpmath.mpc(mpmath.pi)
            if text == "oo":
                raise ValueError("infinity has no number")
            return mpmath.mpc(*point) + mpmath.mpf(sum(map(ord, text)) % 97 + shift) / 50
        case Call(function="neg", argument=argument):
            return -_number(argument, point, shift)
        case Call(function=function, argument=argument):
            value = _number(argument, point, shift)
            called = {"sqrt": mpmath.sqrt, "ln": mpmath.log, "factorial": mpmath.factorial, "factorial2": mpmath.fac2}
            return mpmath.mpc(called[function](value))
        case Binary(operator=operator, left=left, right=right):
            return _APPLY[operator](_number(left, point, shift), _number(right, point, shift))
