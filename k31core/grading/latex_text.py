"""LaTeX of an answer as plain text: `\\frac{\\sqrt{3}}{2}` becomes `√(3)/2`.

deepscaler compares what pylatexenc makes of the LaTeX; this is the part of that conversion that answers use, with the
same results (macros without a known meaning vanish and leave their arguments), in one bounded pass. It reads no files
and knows no definitions, so no macro of an answer can do anything.
"""

import unicodedata

from k31core.grading.latex_symbols import ACCENTS, ARGUMENT_TEXT, BRACKETED, DROPPED_ARGUMENTS, SYMBOLS, math_letters
from k31core.grading.limits import MAX_DEPTH

_LIGATURES = (("---", "—"), ("--", "–"), ("``", "“"), ("''", "”"), ("!`", "¡"), ("?`", "¿"))
_MATRICES = frozenset({"array", "pmatrix", "bmatrix", "smallmatrix", "psmallmatrix", "bsmallmatrix"})


class LatexTextError(ValueError):
    """LaTeX that this conversion cannot read: the caller keeps the text as it was."""


def latex_to_text(latex: str) -> str:
    """The plain text of `latex`. Raises LatexTextError when it is nested too deeply or broken beyond reading.

    A backslash at the very end (`34\\degree` without its unit, or a box that ends in `\\}`) is a macro without a name:
    it vanishes with the space before it.
    """
    if (len(latex) - len(latex.rstrip("\\"))) % 2:
        latex = latex[:-1].rstrip()
    reader = _Reader(latex)
    text = reader.until_closed(0, stop="")
    while reader.position < len(latex):  # a stray closing brace: pylatexenc goes on after it
        reader.position += 1
        text += reader.until_closed(0, stop="")
    return text


class _Reader:
    """A position in the text, moved forward only."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.position = 0

    def until_closed(self, depth: int, stop: str) -> str:
        """Everything up to an unmatched `}` (or `stop`), which is left unread."""
        if depth > MAX_DEPTH:
            raise LatexTextError(f"LaTeX nested deeper than {MAX_DEPTH}")
        source, parts = self.source, []
        while self.position < len(source):
            char = source[self.position]
            if char == "}" or (stop and source.startswith(stop, self.position)):
                break
            parts.append(self._one(char, depth))
        return "".join(parts)

    def _one(self, char: str, depth: int) -> str:
        """The text of the construct that starts here."""
        if char == "\\":
            return self._macro(depth)
        if char == "{":
            return self._group(depth)
        if char == "%":
            end = self.source.find("\n", self.position)
            self.position = len(self.source) if end < 0 else end
            return ""
        if char == "$":
            self.position += 1
            return ""
        for mark, text in _LIGATURES:
            if self.source.startswith(mark, self.position):
                self.position += len(mark)
                return text
        self.position += 1
        return {"~": "\xa0", "&": "   "}.get(char, char)

    def _group(self, depth: int) -> str:
        """A `{...}`; its end may be missing."""
        self.position += 1
        text = self.until_closed(depth + 1, stop="")
        self.position += 1
        return text

    def _macro(self, depth: int) -> str:
        name = self._name()
        if name in ("(", ")", "[", "]"):
            return ""
        if name in ("left", "right", "middle") or name in BRACKETED:
            return ""
        if name == "begin":
            return self._environment(depth)
        if name == "end":
            self._argument(depth)
            return ""
        if name == "verb":
            return self._verbatim()
        if name in SYMBOLS:
            return SYMBOLS[name]
        if name in ("sqrt", "frac", "nicefrac", "textfrac"):
            return self._root_or_fraction(name, depth)
        if name in ACCENTS:
            return _accented(self._argument(depth) or "", ACCENTS[name])
        if name in DROPPED_ARGUMENTS:
            for _ in range(DROPPED_ARGUMENTS[name]):
                self._argument(depth)
            return ""
        if name in ARGUMENT_TEXT:
            return math_letters(self._argument(depth) or "", ARGUMENT_TEXT[name])
        return ""

    def _root_or_fraction(self, name: str, depth: int) -> str:
        """`√(a)` or `a/b`. Without its arguments a root is unreadable, and a fraction is a text equal to nothing."""
        if name == "sqrt":
            self._optional(depth)
        first = self._argument(depth)
        if name == "sqrt":
            if first is None:
                raise LatexTextError("a root lacks its argument")
            return f"√({first})"
        second = None if first is None else self._argument(depth)
        if second is None:
            return "%s/%s" + (first or "")  # what was read stays read: going back would double the work at each level
        return f"{first}/{second}"

    def _name(self) -> str:
        """The name of the macro here; spaces after a name of letters belong to it."""
        source, start = self.source, self.position + 1
        if start >= len(source):  # only behind an odd `\\verb`: `latex_to_text` leaves no single one at the end
            raise LatexTextError("LaTeX ends in a backslash")
        end = start
        while end < len(source) and source[end].isascii() and source[end].isalpha():
            end += 1
        if end == start:
            self.position = start + 1
            return source[start]
        name = source[start:end]
        if end < len(source) and source[end] == "*":
            end += 1
        self.position = end
        self._skip_spaces()
        return name

    def _skip_spaces(self) -> None:
        while self.position < len(self.source) and self.source[self.position].isspace():
            self.position += 1

    def _argument(self, depth: int) -> str | None:
        """The next group, macro (alone, without arguments of its own) or character; None when there is none."""
        if depth >= MAX_DEPTH:
            raise LatexTextError(f"LaTeX nested deeper than {MAX_DEPTH}")
        self._skip_spaces()
        if self.position >= len(self.source) or self.source[self.position] == "}":
            return None
        if self.source[self.position] == "\\":
            name = self._name()
            if name == "sqrt":
                raise LatexTextError("a root lacks its argument")
            return "%s/%s" if name in ("frac", "nicefrac", "textfrac") else SYMBOLS.get(name, "")
        return self._one(self.source[self.position], depth + 1)

    def _optional(self, depth: int) -> str:
        """A `[...]` argument if one is here."""
        self._skip_spaces()
        if not self.source.startswith("[", self.position):
            return ""
        self.position += 1
        text = self.until_closed(depth + 1, stop="]")
        self.position += 1
        return text

    def _verbatim(self) -> str:
        """`\\verb` takes a delimiter and everything up to the next one, and is read as nothing."""
        if self.position < len(self.source):
            end = self.source.find(self.source[self.position], self.position + 1)
            if end >= 0:
                self.position = end + 1
                return ""
        raise LatexTextError("\\verb is not closed")

    def _environment(self, depth: int) -> str:
        """The inside of `\\begin{name}...\\end{name}`; matrices are written `[ a b; c d ]`."""
        name = self._argument(depth) or ""
        if name == "array":
            self._argument(depth)
        inside = self.until_closed(depth + 1, stop="\\end")
        if self.position < len(self.source) and self.source[self.position] == "\\":
            self._name()
            self._argument(depth)
        if name not in _MATRICES:
            return inside
        rows = [[cell.strip() for cell in row.split("   ")] for row in inside.split("\n")]
        return "[ " + "; ".join(" ".join(row) for row in rows) + " ]"


def _accented(text: str, combining: str) -> str:
    """`text` with the accent on its last character."""
    return unicodedata.normalize("NFC", text.strip() + combining) if text.strip() else combining
