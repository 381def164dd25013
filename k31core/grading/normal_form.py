"""Second rule of deepscaler: a looser normal form (units, commas, percent signs, mixed numbers, case), then its parts.

The steps and their order are those of the public deepscaler grader, oddities included: `-7 3/4` becomes `-7+3/4`, unit
names vanish wherever they stand, whole numbers pass through a float.
"""

import re

from k31core.grading.latex_text import LatexTextError, latex_to_text

_WHOLE_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_UNITS = tuple(
    re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?")
    for unit in (
        *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
        *("foot", "feet", "inch", "yard"),
    )
)
_UNIT_STARTS = ("d", "c", "m", "s", "h", "w", "y", "f", "i")
_DEGREES = re.compile(r"\^ *\\circ")
_COMMA_THIN_SPACE = re.compile(r",\\! *")
_MINUS_SPACE = re.compile(r"- *")
_MIXED_NUMBER = re.compile(r"([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"


def normalise_loose(answer: str) -> str:
    """`answer` in the loose normal form."""
    whole = _WHOLE_TEXT.search(answer)
    text = whole.group("text") if whole is not None else answer
    for old, new in (
        ("\\%", "%"),
        ("\\$", "$"),
        ("$", ""),
        ("%", ""),
        (" or ", " , "),
        (" and ", " , "),
        ("million", "*10^6"),
        ("billion", "*10^9"),
        ("trillion", "*10^12"),
    ):
        text = text.replace(old, new)
    if any(letter in text for letter in _UNIT_STARTS):
        for unit in _UNITS:
            text = unit.sub("", text)
    text = _DEGREES.sub("", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = _COMMA_THIN_SPACE.sub("", text)
    rounded = _nearly_whole(text)
    if rounded is not None:
        text = str(rounded)
    if "\\" in text:
        text = _text_of_latex(text)
    text = _MINUS_SPACE.sub("-", text)
    text = _MIXED_NUMBER.sub(r"\1+\2", text)
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    if is_whole_number(text):
        text = str(int(float(text.replace(",", ""))))
    return text


def _text_of_latex(text: str) -> str:
    """`text` without LaTeX; as it is when it is no readable LaTeX."""
    try:
        plain = latex_to_text(
            text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
        )
    except LatexTextError:
        return text
    for old, new in (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*")):
        plain = plain.replace(old, new)
    return plain.strip()


def _nearly_whole(text: str) -> int | None:
    """The whole number within 1e-7 of the float that `text` spells, if any (as Python spells it: `1_000`, `５`)."""
    try:
        value = float(text)
        nearest = round(value)
    except (ValueError, OverflowError):
        return None
    return nearest if abs(value - nearest) <= 1e-7 else None


def is_whole_number(text: str) -> bool:
    """True when `text`, thousands commas removed, spells a whole number to within 1e-7."""
    return _nearly_whole(without_thousands_commas(text)) is not None


def without_thousands_commas(text: str) -> str:
    """`1,234,567` becomes `1234567`; commas of tuples stay."""
    while True:
        shorter = _THOUSANDS.sub(r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def is_fraction(text: str) -> bool:
    """True for a plain fraction of integers: two of those must agree as strings, so `2/4` is not `1/2`."""
    return _FRACTION.search(text) is not None


def parts_of(text: str) -> list[str]:
    """The elements of a bracketed tuple or interval; anything else is one element."""
    text = without_thousands_commas(text)
    if not text:
        return []
    inside = text[1:-1]
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(c in inside for c in _BRACKETS):
        return [part.strip() for part in inside.split(",")]
    return [text]
