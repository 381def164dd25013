"""math-verify's LaTeX reader without its detour through Python: numbers become sympy numbers digit by digit.

latex2sympy2_extended reads LaTeX with an antlr grammar and builds sympy objects, except for numbers: those it gives as
text to `sympy.Number`, which evaluates text. The subclass here replaces that one step. It overrides two methods of a
class without a public name (latex2sympy2_extended 1.11.0, pinned by math-verify 0.9.0); `test_second_opinion.py` fails
when an upgrade changes them, and the worker refuses any evaluation besides.
"""

import re
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

_INTEGER = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")
_THOUSANDS = re.compile(r"\s*-?\d{1,3}(,\d{3})+(\.\d+)?\s*", re.ASCII)


class NotANumber(ValueError):
    """Digits that spell no decimal number, e.g. those of other scripts."""


def number_of(text: str) -> sympy.Number:
    """The sympy number that `text` spells. Raises NotANumber for anything but a decimal number."""
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return sympy.Integer(int(text))
    if _DECIMAL.fullmatch(text):
        return sympy.Float(text)
    raise NotANumber(f"{text[:40]!r} is no decimal number")


class _LatexReader(_Latex2Sympy):  # type: ignore[misc]
    """The reader with numbers of its own."""

    def parse(self, latex: str) -> object:
        """The sympy object of `latex`; a number with thousands commas is one number, not a set."""
        if _THOUSANDS.fullmatch(latex):
            grouped = latex.strip()
            return number_of(grouped.replace(",", "." if grouped.startswith("0") else ""))
        return super().parse(latex)

    def parse_number(self, text: str) -> sympy.Number:
        """The number of a token of the grammar: digits, commas, a point, an exponent."""
        return number_of(text.replace(",", ""))


@lru_cache(maxsize=20)
def read_latex(latex: str) -> object:
    """The sympy object of normalised `latex`, or of what follows its last equals sign when the whole is unreadable.

    Raises whatever antlr and sympy raise when neither can be read.
    """
    try:
        return _reader(latex).parse(latex)
    except MemoryError:
        raise
    except Exception:
        last_side = get_last_eq(latex)
        if last_side == latex:
            raise
        return _reader(last_side).parse(last_side)


def _reader(latex: str) -> _LatexReader:
    return _LatexReader(None, not should_treat_as_complex(latex), False)
