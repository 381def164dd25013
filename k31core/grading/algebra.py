"""Reads the algebra of a normalised answer into a tree, without evaluating anything.

The grammar is what deepscaler's parser accepts after its filters (`worth_reading`): numbers, letters, `+ - * / ^ **`,
parentheses, `!`, implied multiplication (`2x`, `ab`, `3(x+1)`), `sqrt(...)`, `ln(...)`, `pi` and `oo`. Everything else
(comparisons, commas, attributes, strings, other names) is no algebra, so two answers with it are equal only as strings.
The two sides are read apart: parentheses that only balance across both sides do not count.
"""

import re
from dataclasses import dataclass
from unicodedata import lookup

from k31core.grading.limits import MAX_ALGEBRA_CHARS, MAX_DEPTH, MAX_LINKS

FUNCTIONS = frozenset({"sqrt", "ln"})
CONSTANTS = frozenset({"pi", "oo"})
_UNREADABLE_NAMES = frozenset(
    {"all", "csc", "eye", "ff", "fft", "frac", "fu", "gff", "id", "im", "jn", "li", "nan"}
) | {*("ntt", "re", "rf", "yn", "zoo", "hn1", "hn2", "if", "in", "is", "or", "as")}
"""Names that mean something else than a letter product to sympy or to Python."""

_TOKEN = re.compile(
    r"(?P<number>(?:\d+(?:_\d+)*(?:\.(?:\d+(?:_\d+)*)?)?|\.\d+(?:_\d+)*)(?:e[+-]?\d+)?)(?P<imaginary>j(?!\w))?"
    r"|(?P<name>[^\W\d]\w*)|(?P<operator>\*\*|!!|[-+*/^()!])",
    re.ASCII,
)
_LETTER_NAME = re.compile(r"[^\W\d_]\w*")
_TOWER = re.compile(r"\^[0-9]+\^|\^[0-9][0-9]+")


class NotAlgebra(ValueError):
    """Text that is no algebra in this grammar."""


class TooLarge(ValueError):
    """Algebra that is too long, too deep or too big to evaluate."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal as written (`12`, `0.5`, `1e3`)."""

    text: str

    @property
    def is_integer(self) -> bool:
        """False for a literal with a point or an exponent: those are floats."""
        return self.text.isdigit()


@dataclass(frozen=True, slots=True)
class Name:
    """A letter, `pi`, `oo`, or `i` as the imaginary unit of `3j`."""

    text: str
    imaginary_unit: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """`sqrt`, `ln`, `factorial`, `factorial2` or `neg` of one argument."""

    function: str
    argument: "Node"


@dataclass(frozen=True, slots=True)
class Binary:
    """`+ - * / ^` of two arguments."""

    operator: str
    left: "Node"
    right: "Node"


Node = Number | Name | Call | Binary


def worth_reading(truth: str, given: str) -> bool:
    """deepscaler's filter: at most two different letters, no braces or parentheses or towers in exponents."""
    both = f"({truth})-({given})"
    letters = {char for char in both.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    return len(letters) <= 2 and "^{" not in both and "^(" not in both and _TOWER.search(both) is None


def read_algebra(text: str) -> Node:
    """The tree of `text`. Raises NotAlgebra, or TooLarge for text beyond the limits of length and depth."""
    if len(text) > MAX_ALGEBRA_CHARS:
        raise TooLarge(f"an expression of {len(text)} characters, limit {MAX_ALGEBRA_CHARS}")
    parser = _Parser(_tokens(text))
    tree = parser.sum(0)
    if parser.peek() is not None:
        raise NotAlgebra(f"{parser.peek()!r} does not belong there")
    return tree


def _tokens(text: str) -> list[str | Number | Name]:
    """Operators as strings, numbers and letters as leaves; implied multiplication is written out."""
    tokens: list[str | Number | Name] = []
    position = 0
    while position < len(text):
        if text[position].isspace():  # line breaks: spaces are gone by now
            position += 1
            continue
        match = _TOKEN.match(text, position) or _LETTER_NAME.match(text, position)
        if match is None:
            raise NotAlgebra(f"{text[position]!r} is no part of an expression")
        position = match.end()
        groups = match.groupdict()
        if match.group() == "0" and text[position : position + 1] in ("x", "o", "b"):
            raise NotAlgebra("a number in another base")
        if groups.get("operator"):
            fresh: list[str | Number | Name] = ["^" if groups["operator"] == "**" else groups["operator"]]
        elif groups.get("number"):
            fresh = [_number(groups["number"])]
            if groups["imaginary"]:
                fresh += ["*", Name("i", imaginary_unit=True)]
        else:
            fresh = _names(match.group(), followed_by_factorial=text.startswith("!", position))
        if tokens and _ends_value(tokens[-1]) and _starts_value(fresh[0]):
            tokens.append("*")
        tokens += fresh
    return tokens


def _number(text: str) -> Number:
    text = text.replace("_", "")
    if text.isdigit() and len(text) > 1 and text[0] == "0" and text.strip("0"):
        raise NotAlgebra(f"{text!r}: a number does not start with 0")
    return Number(text)


def _names(word: str, *, followed_by_factorial: bool) -> list[str | Number | Name]:
    """A known name, or a product of letters and digits; greek letter names and names with `_` stay whole."""
    if word in FUNCTIONS:
        return [word]
    if word in _UNREADABLE_NAMES:
        raise NotAlgebra(f"the name {word!r} is no number or letter")
    if word in CONSTANTS or len(word) == 1 or "_" in word or _is_greek(word):
        return [Name(word)]
    factors: list[str | Number | Name] = []
    for part in re.findall(r"\d+|\D", word):
        if factors:
            factors.append("*")
        factors.append(Number(part) if part.isdigit() and part.isascii() else Name(part))
    return ["(", *factors, ")"] if followed_by_factorial else factors


def _is_greek(word: str) -> bool:
    try:
        lookup(f"GREEK SMALL LETTER {word}")
    except KeyError:
        return False
    return True


def _ends_value(token: str | Number | Name) -> bool:
    return not isinstance(token, str) or token in {")", "!", "!!"}


def _starts_value(token: str | Number | Name) -> bool:
    return not isinstance(token, str) or token == "(" or token in FUNCTIONS


class _Parser:
    """Python's precedence: sum < product < sign < power (right to left) < factorial."""

    def __init__(self, tokens: list[str | Number | Name]) -> None:
        self.tokens = tokens
        self.position = 0
        self.links = 0

    def linked(self) -> None:
        """Counts a step of a chain (`1+1+1`, `x!!!`): a chain makes the tree as deep as it is long."""
        self.links += 1
        if self.links > MAX_LINKS:
            raise TooLarge(f"an expression of more than {MAX_LINKS} operators")

    def peek(self) -> str | Number | Name | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str | Number | Name | None:
        token = self.peek()
        self.position += 1
        return token

    def sum(self, depth: int) -> Node:
        left = self.product(depth)
        while self.peek() in ("+", "-"):
            self.linked()
            operator = str(self.take())
            left = Binary(operator, left, self.product(depth))
        return left

    def product(self, depth: int) -> Node:
        left = self.signed(depth)
        while self.peek() in ("*", "/"):
            self.linked()
            operator = str(self.take())
            left = Binary(operator, left, self.signed(depth))
        return left

    def signed(self, depth: int) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        value = self.power(depth)
        return Call("neg", value) if negative else value

    def power(self, depth: int) -> Node:
        base = self.postfix(depth)
        if self.peek() != "^":
            return base
        self.take()
        return Binary("^", base, self.signed(_deeper(depth)))

    def postfix(self, depth: int) -> Node:
        value = self.atom(depth)
        while self.peek() in ("!", "!!"):
            self.linked()
            value = Call("factorial" if self.take() == "!" else "factorial2", value)
        return value

    def atom(self, depth: int) -> Node:
        token = self.take()
        if isinstance(token, Number | Name):
            return token
        if token in FUNCTIONS:
            if self.peek() == "(":
                return Call(str(token), self.atom(depth))
            return Call(str(token), self.power(_deeper(depth)))
        if token == "(":
            inside = self.sum(_deeper(depth))
            if self.take() != ")":
                raise NotAlgebra("a parenthesis is not closed")
            return inside
        raise NotAlgebra("a value is missing" if token is None else f"{token!r} is no value")


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise TooLarge(f"nested deeper than {MAX_DEPTH}")
    return depth + 1
