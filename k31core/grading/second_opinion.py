"""The math-verify verdict: Hugging Face's math-verify 0.9.0 on the text after the thinking. Imports it: workers only.

math-verify looks for answers in that text by itself (boxes, formulas, numbers) and accepts more than deepscaler does:
`5!`, `2^{10}`, `\\frac{68}{2}` for whole numbers. Its own search ends in sympy's `Number(text)` and `parse_expr(text)`,
which evaluate text as Python. So the search loop here is ours: math-verify's patterns find the places, formulas go
through its grammar (`latex_reader.py`), plain arithmetic through `algebra.py`, and its `verify` compares.
"""

import re
from dataclasses import replace
from itertools import groupby, product

import sympy
from latex2sympy2_extended.latex2sympy2 import convert_to_pct, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify
from math_verify.parser import get_extraction_regexes

from k31core.grading.algebra import Binary, Call, Node, NotAlgebra, Number, read_algebra
from k31core.grading.exact import check_size
from k31core.grading.latex_reader import NotANumber, number_of, read_latex
from k31core.grading.verdict import Outcome
from k31core.rl.types import GradeReason

_TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())
_PLACES = ("first", "next1", "next2", "next3", "next4", "next5")
"""Prefixes of the groups of math-verify's LaTeX pattern: formulas joined by commas, `and`, `or`."""

_SIDE_BY_SIDE = re.compile(r"[\d.)]\s+[\d.]|[\d.)]\s*\(|\)\s*[\d.]")
"""Numbers without an operator between them: no arithmetic to math-verify, which implies no multiplication here."""


def grade_with_math_verify(text: str, label: str) -> Outcome:
    """The verdict on `text` (already through `static_check`). Raises MemoryError at the memory limit."""
    answers = extract(text)
    if not answers:
        return Outcome(0, GradeReason.NO_BOX)
    truths = extract(label if "\\boxed" in label else f"\\boxed{{{label}}}")
    for truth, answer in product(truths, answers):
        if _same(truth, answer):
            return Outcome(1, GradeReason.CORRECT)
    return Outcome(0, GradeReason.WRONG)


def _same(truth: object, answer: object) -> bool:
    try:
        # The worker is killed at its limit, so math-verify's own alarms are off.
        return bool(verify(truth, answer, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        return False  # verify raises whatever sympy raises; without raise_on_error it would count as unequal as well


def extract(text: str) -> list[object]:
    """The expression that math-verify takes for the answer, and the string it was read from; empty without one.

    A number in other than ASCII digits ends the search without an answer, as it does in math-verify.
    """
    try:
        return _search(text)
    except NotANumber:
        return []


def _search(text: str) -> list[object]:
    fallback = ""
    patterns = sorted(
        (
            (priority, pattern, target)
            for found, target in get_extraction_regexes(_TARGETS)
            for pattern, priority in found
        ),
        key=lambda item: item[0],
    )
    for _, group in groupby(patterns, key=lambda item: item[0]):
        matches = [(match, target) for _, pattern, target in group for match in pattern.finditer(text)]
        matches.sort(key=lambda item: (item[0].end(), -item[0].start()), reverse=True)
        for match, target in matches:
            expression, source = _read(match, target)
            fallback = fallback or source
            if expression is not None:
                return [expression, fallback] if fallback else [expression]
    return [fallback] if fallback else []


def _read(match: re.Match[str], target: object) -> tuple[object, str]:
    """The expression at a place, None when it cannot be read, and the text of it."""
    groups = {name: value for name, value in match.groupdict().items() if value}
    if isinstance(target, LatexExtractionConfig):
        return _formulas(groups, target)
    integer = next((value for name, value in groups.items() if name.startswith("integer")), "")
    decimal = next((value for name, value in groups.items() if name.startswith("decimal")), "")
    if not integer and not decimal:
        source = groups.get("expr", "")
        return _arithmetic(source), source
    digits = (integer.replace(",", "").replace(" ", "").lstrip("0") or "0") + decimal.replace(",", ".")
    number = number_of(digits)
    return (convert_to_pct(number) if "percent" in groups else number), digits


def _formulas(groups: dict[str, str], target: LatexExtractionConfig) -> tuple[object, str]:
    """The one formula that matched, or the set of several."""
    expressions, sources = [], []
    for place in _PLACES:
        found = next(((name, value) for name, value in groups.items() if name.startswith(f"{place}_latex")), None)
        if found is None:
            continue
        config = target.normalization_config
        if found[0].endswith("_latexBoxed"):
            config = replace(config, boxed="last")
        source = normalize_latex(found[1], config=config)
        sources.append(source)
        try:
            expression = read_latex(source)
        except MemoryError:
            raise
        except Exception:
            expression = None  # the reader raises whatever antlr and sympy raise for LaTeX that is none
        if expression is not None and f"{place}_percent" in groups:
            expression = convert_to_pct(expression)
        expressions.append(expression)
    if len(expressions) > 1 and None not in expressions:
        members = [m for e in expressions for m in (e.args if isinstance(e, FiniteSet) else (e,))]
        return FiniteSet(*members), " and ".join(sources)
    return (expressions[0], sources[0]) if expressions else (None, "")


def _arithmetic(source: str) -> object:
    """The unevaluated sympy expression of plain arithmetic; None when it is none."""
    if _SIDE_BY_SIDE.search(source):
        return None
    try:
        tree = read_algebra(re.sub(r"\s", "", source))
        check_size(tree)
    except NotAlgebra:
        return None
    return _unevaluated(tree)


def _unevaluated(node: Node) -> sympy.Expr:
    match node:
        case Number(text=text):
            return sympy.Integer(int(text)) if node.is_integer else sympy.Float(text)
        case Call(function="neg", argument=argument):
            return sympy.Mul(-1, _unevaluated(argument), evaluate=False)
        case Binary(operator=operator, left=left, right=right):
            a, b = _unevaluated(left), _unevaluated(right)
            match operator:
                case "+":
                    return sympy.Add(a, b, evaluate=False)
                case "-":
                    return sympy.Add(a, sympy.Mul(-1, b, evaluate=False), evaluate=False)
                case "*":
                    return sympy.Mul(a, b, evaluate=False)
                case "/":
                    return sympy.Mul(a, sympy.Pow(b, -1, evaluate=False), evaluate=False)
            return sympy.Pow(a, b, evaluate=False)
    raise NotAlgebra("no plain arithmetic")
