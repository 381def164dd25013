"""Looks at LaTeX before math-verify does: length, depth, exponents, factorials, digits. Nothing is evaluated.

The check is coarse on purpose: it refuses what is sure to be too large and leaves the rest to the worker's limits.
"""

import re

from k31core.grading.limits import MAX_DEPTH, MAX_MATH_VERIFY_CHARS

_MAX_DIGITS = 2_000
_MAX_EXPONENT = 1_000_000
_MAX_GROUP_EXPONENT = 10_000
_MAX_FACTORIAL = 9_999
_MAX_INNER_FACTORIAL = 7
_OPEN = r"[\s{(]*"
_POWER = re.compile(
    rf"(?P<group>[)}}\]])?\s*\^{_OPEN}-?{_OPEN}(?P<exponent>\d[\d,_]*)(?P<tower>{_OPEN}\^{_OPEN}(?P<upper>\d+))?"
)
_TRIPLE_TOWER = re.compile(rf"(?:\^{_OPEN}\w+[\s)}}]*){{3,}}")
_FACTORIAL = re.compile(r"(\d+)[\s)}]*!")
_NESTED_FACTORIAL = re.compile(r"(\d+)[\s)}]*!\s*[)}][\s)}]*!(?P<third>[\s)}]*!)?|!\s*!\s*!")
_LONG_DIGITS = re.compile(rf"\d{{{_MAX_DIGITS + 1}}}")


def refusal(text: str) -> str | None:
    """Why `text` must not be given to a LaTeX algebra system; None when it may."""
    if len(text) > MAX_MATH_VERIFY_CHARS:
        return f"{len(text)} characters, limit {MAX_MATH_VERIFY_CHARS}"
    if _depth(text) > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    if _LONG_DIGITS.search(text):
        return f"a number of more than {_MAX_DIGITS} digits"
    # One blank for many: the patterns below would look at a long run of blanks from each of them anew.
    plain = " ".join(text.replace("**", "^").replace("\\left", "").replace("\\right", "").split())
    if _TRIPLE_TOWER.search(plain):
        return "a tower of three or more powers"
    for match in _POWER.finditer(plain):
        exponent = _size(match["exponent"], match["upper"])
        if exponent > (_MAX_GROUP_EXPONENT if match["group"] else _MAX_EXPONENT):
            return f"the exponent {match['exponent'][:20]}"
    if any(int(n[:7]) > _MAX_FACTORIAL for n in _FACTORIAL.findall(plain)):
        return f"a factorial above {_MAX_FACTORIAL}!"
    for match in _NESTED_FACTORIAL.finditer(plain):
        if match[1] is None or match["third"] or int(match[1][:7]) > _MAX_INNER_FACTORIAL:
            return "a factorial of a large factorial"
    return None


def _size(exponent: str, upper: str | None) -> int:
    """The exponent, with a second power on it if there is one; cut at a value above every limit."""
    base = int(exponent.replace(",", "").replace("_", "")[:9] or 0)
    if upper is None or base < 2:
        return base
    if len(upper) > 2 or int(upper) > 30:
        return 10 * _MAX_EXPONENT
    return int(min(base ** int(upper), 10 * _MAX_EXPONENT))


def _depth(text: str) -> int:
    """The deepest nesting of brackets of any kind; a stray closing bracket does not count."""
    depth = deepest = 0
    for char in text:
        if char in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")}]":
            depth = max(0, depth - 1)
    return deepest
