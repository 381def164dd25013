"""Sizes of expressions before they are evaluated, and exact rational arithmetic for those that are small numbers."""

import math
from fractions import Fraction

from k31core.grading.algebra import Binary, Call, Name, Node, Number, TooLarge
from k31core.grading.limits import MAX_BITS, MAX_EXACT_BITS, MAX_SYMBOLIC_EXPONENT

_MAX_EXPONENT_BITS = 20
_MAX_FACTORIAL_BITS = 13
_FLOAT_TOLERANCE = Fraction(1, 10**12)


class _Undecided(Exception):
    """Not a small exact number: something for a worker."""


def check_size(node: Node) -> None:
    """Raises TooLarge when the value of `node` could have more than MAX_BITS bits."""
    _bound(node)


def _bound(node: Node) -> tuple[float, bool]:
    """An upper bound of log2 of numerator and denominator of `node`, and whether letters are in it."""
    match node:
        case Number():
            return _literal_bits(node.text), False
        case Name():
            return 2.0, node.text not in {"pi", "oo"} and not node.imaginary_unit
        case Call(function=function, argument=argument):
            bits, symbolic = _bound(argument)
            if function in {"factorial", "factorial2"} and not symbolic:
                if bits > _MAX_FACTORIAL_BITS:
                    raise TooLarge(f"the factorial of a number of {bits:.0f} bits")
                bits = bits * 2**bits
            return _checked(bits), symbolic
        case Binary(operator=operator, left=left, right=right):
            left_bits, left_symbolic = _bound(left)
            right_bits, right_symbolic = _bound(right)
            symbolic = left_symbolic or right_symbolic
            if operator != "^":
                return _checked(left_bits + right_bits + 1), symbolic
            if right_symbolic:
                return left_bits, True
            if right_bits > _MAX_EXPONENT_BITS:
                raise TooLarge(f"an exponent of {right_bits:.0f} bits")
            exponent = 2**right_bits
            if left_symbolic and exponent > 2 * MAX_SYMBOLIC_EXPONENT:
                raise TooLarge(f"the exponent {exponent:.0f} over letters")
            return _checked(left_bits * exponent), symbolic


def _literal_bits(text: str) -> float:
    if text.isdigit():
        return float(int(text).bit_length())
    mantissa, _, exponent = text.partition("e")
    power = abs(int(exponent)) if exponent and len(exponent) < 12 else 10**12 * bool(exponent)
    return _checked((len(mantissa) + power) * math.log2(10))


def _checked(bits: float) -> float:
    if bits > MAX_BITS:
        raise TooLarge(f"a number of up to {bits:.3g} bits, limit {MAX_BITS}")
    return bits


def exactly_equal(truth: Node, given: Node) -> bool | None:
    """Whether two numbers are equal; None when one is no small rational number, so that a worker must decide.

    Float literals compare as sympy's floats do: equal when the decimal is exact, different when they are clearly
    apart, undecided within 1e-12 of each other.
    """
    try:
        left, right = _value(truth), _value(given)
    except _Undecided:
        return None
    except ZeroDivisionError:
        return False
    if left == right:
        return True if not (_has_float(truth) or _has_float(given)) or _both_literal(truth, given) else None
    if _has_float(truth) or _has_float(given):
        return False if abs(left - right) > _FLOAT_TOLERANCE * max(abs(left), abs(right)) else None
    return False


def _both_literal(truth: Node, given: Node) -> bool:
    """No arithmetic of floats that could round: literals, or quotients of integers."""
    return all(isinstance(node, Number) or not _has_float(node) for node in (truth, given))


def _has_float(node: Node) -> bool:
    match node:
        case Number():
            return not node.is_integer
        case Call(argument=argument):
            return _has_float(argument)
        case Binary(left=left, right=right):
            return _has_float(left) or _has_float(right)
    return False


def _value(node: Node) -> Fraction:
    match node:
        case Number(text=text):
            if _literal_bits(text) > MAX_EXACT_BITS:
                raise _Undecided
            return Fraction(text)
        case Call(function="neg", argument=argument):
            return -_value(argument)
        case Call(function="factorial", argument=argument):
            return _factorial(_value(argument))
        case Binary(operator=operator, left=left, right=right):
            return _combined(operator, _value(left), _value(right))
    raise _Undecided


def _combined(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "^":
        size = max(left.numerator.bit_length(), left.denominator.bit_length())
        if right.denominator != 1 or abs(right) * size > MAX_EXACT_BITS:
            raise _Undecided
        return Fraction(left ** int(right))
    match operator:
        case "+":
            value = left + right
        case "-":
            value = left - right
        case "*":
            value = left * right
        case _:
            value = left / right
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_EXACT_BITS:
        raise _Undecided
    return value


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= 300:
        raise _Undecided
    return Fraction(math.factorial(int(value)))
