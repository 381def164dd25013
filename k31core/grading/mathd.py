"""First rule of deepscaler: string equality after the usual MATH normalisation.

The steps and their order are those of the public MATH graders, oddities included, because a reward is only comparable
between runs when the verdicts are. Where the public code gives up half-way (it indexes past the end of a string), the
answer counts as it was before normalisation; `_Unreadable` marks those places.
"""

import re

_WHOLE_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")


class _Unreadable(Exception):
    """A form that the MATH normalisation does not handle: the answer is taken as it is."""


def normalise_mathd(answer: str) -> str:
    """`answer` in the normal form of the MATH data set."""
    answer = answer.strip()
    whole = _WHOLE_TEXT.search(answer)
    if whole is not None:
        answer = whole.group("text").strip()
    try:
        return _normal_form(answer)
    except _Unreadable:
        return answer


def _normal_form(text: str) -> str:
    for old, new in (
        ("\n", ""),
        ("\\!", ""),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\$", ""),
    ):
        text = text.replace(old, new)
    text = _without_unit(text)
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_braced_roots(text).replace(" ", "")
    text = _with_braced_fractions(text)
    if text == "0.5":
        text = "\\frac{1}{2}"
    return _slash_as_fraction(text)


def _without_unit(text: str) -> str:
    """Cuts at `\\text{ `, which in this data set only opens a unit; two of them are beyond the rule."""
    parts = text.split("\\text{ ")
    if len(parts) > 2:
        raise _Unreadable
    return parts[0]


def _with_braced_roots(text: str) -> str:
    """`\\sqrt3` becomes `\\sqrt{3}`."""
    head, *rest = text.split("\\sqrt")
    parts = [head]
    for part in rest:
        if not part:
            raise _Unreadable
        parts.append("\\sqrt" + (part if part[0] == "{" else "{" + part[0] + "}" + part[1:]))
    return "".join(parts)


def _with_braced_fractions(text: str) -> str:
    """`\\frac12` and `\\frac1{72}` become `\\frac{1}{2}` and `\\frac{1}{72}`."""
    head, *rest = text.split("\\frac")
    parts = [head]
    for part in rest:
        if not part:
            raise _Unreadable
        if part[0] == "{":
            parts.append("\\frac" + part)
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            parts.append("\\frac{" + part[0] + "}" + part[1:])
        else:
            parts.append("\\frac{" + part[0] + "}{" + part[1] + "}" + part[2:])
    return "".join(parts)


def _slash_as_fraction(text: str) -> str:
    """`a/b` of two plain integers becomes `\\frac{a}{b}`."""
    parts = text.split("/")
    if len(parts) != 2 or max(map(len, parts)) > 4_000:
        return text
    try:
        numerator, denominator = int(parts[0]), int(parts[1])
    except ValueError:
        return text
    if text != f"{numerator}/{denominator}":
        return text
    return f"\\frac{{{numerator}}}{{{denominator}}}"
