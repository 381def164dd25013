"""The limits of grading, in one place: what is refused before any algebra, and what a worker may use."""

from dataclasses import dataclass

MAX_BOX_CHARS = 10_000
"""A longer box is refused. The longest label of the public mathematics sets has fewer than 300 characters."""

MAX_ALGEBRA_CHARS = 1_000
"""Per side of a symbolic comparison, after normalisation."""

MAX_DEPTH = 60
"""Nested parentheses or braces."""

MAX_LINKS = 300
"""Operators of one expression."""

MAX_BITS = 100_000
"""Size of a number that an expression may evaluate to, as an upper bound of its log2."""

MAX_EXACT_BITS = 4_096
"""Numbers up to this size are computed where the pool runs; larger ones in a worker."""

MAX_SYMBOLIC_EXPONENT = 1_000
"""An integer exponent over a base with letters in it."""

MAX_MATH_VERIFY_CHARS = 65_536
"""math-verify searches the whole text after the thinking with regular expressions."""

MAX_LINE_BYTES = 1 << 20
"""One line of the protocol between pool and worker, either way."""

MAX_REPLY_BYTES = 512
"""A worker's answer is a number and a word."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one answer may cost in a worker before the worker is killed."""

    wall_s: float = 5.0
    """Seconds by the clock, from the request to the reply."""
    cpu_s: float = 5.0
    """Seconds of processor time, from the start of the request (RLIMIT_CPU: rounded up to whole seconds)."""
    memory_mb: int = 1024
    """Address space that a worker may add to what sympy and math-verify take at its start, in MiB (RLIMIT_AS)."""

    def __post_init__(self) -> None:
        for name, value in (("wall", self.wall_s), ("cpu", self.cpu_s), ("memory", self.memory_mb)):
            if not value > 0:
                raise ValueError(f"the {name} limit of the graders is {value}: it must be above 0")
