"""One grader process: reads requests from its socket, grades, answers with a number and a word.

A worker is forked from the template (`template.py`), lowers its own limits, and is killed from outside when it exceeds
them. It trusts no text: requests are JSON lines with a bounded length, replies hold nothing of the answer, and an audit
hook refuses to compile text, to open files, to start processes or to connect, whatever a library may try.
"""

import json
import math
import os
import re
import resource
import socket
import sys
import sysconfig
from typing import Any

from k31core.grading.algebra import TooLarge
from k31core.grading.limits import MAX_LINE_BYTES, WorkerLimits
from k31core.grading.static_check import refusal
from k31core.grading.verdict import Outcome
from k31core.rl.types import GradeReason

_FORBIDDEN_PREFIXES = ("os.", "subprocess.", "socket.", "pty.", "shutil.", "ctypes.", "urllib.", "ftplib.", "pickle.")
_FORBIDDEN = frozenset({"code.__new__", "builtins.input"})
_LIBRARIES = frozenset({"sympy", "mpmath", "math_verify", "latex2sympy2_extended", "antlr4", "numpy", "gmpy2"})
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN_CODE = re.compile(rb"def monomial_[a-z]+\((?:return|if|else|None|[abr]\d+|[ABk]|\d+|[\s(),:=+*<>-])+")
"""The one kind of code that sympy generates while it simplifies: arithmetic of exponents, the same for every answer."""


class ForbiddenEvent(RuntimeError):
    """A library tried to run code, open a file or reach outside while grading."""


def refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook (`sys.addaudithook`) of the workers. sympy imports some of its parts late, which stays possible.

    Raises ForbiddenEvent.
    """
    match event:
        case "import":
            root = str(arguments[0]).partition(".")[0]
            allowed = root in _LIBRARIES or root in sys.stdlib_module_names
        case "compile":
            source, name = arguments
            allowed = _is_installed(name) or (isinstance(source, bytes) and _OWN_CODE.fullmatch(source) is not None)
        case "open":
            allowed = _is_installed(arguments[0]) and arguments[1] == "r"
        case "os.listdir":
            allowed = True
        case _:
            allowed = event not in _FORBIDDEN and not event.startswith(_FORBIDDEN_PREFIXES)
    if not allowed:
        raise ForbiddenEvent(f"{event} while grading")


def _is_installed(path: object) -> bool:
    """A file of the interpreter or of an installed library."""
    return isinstance(path, str) and path.startswith(_INSTALLED) and path.endswith((".py", ".pyc", ".so"))


def serve(connection: socket.socket, limits: WorkerLimits) -> None:
    """Answers requests until the other side closes. Never returns an answer that took more than the limits."""
    _lower_limits(limits)
    reader = connection.makefile("rb")
    sys.addaudithook(refuse_side_effects)
    while True:
        line = reader.readline(MAX_LINE_BYTES + 1)
        if not line.endswith(b"\n"):
            return
        _start_cpu_clock(limits)
        request = json.loads(line)
        outcome = _grade(request)
        reply = {"id": request["id"], "score": outcome.score, "reason": outcome.reason.value}
        connection.sendall(json.dumps(reply).encode() + b"\n")


def _grade(request: dict[str, Any]) -> Outcome:
    from k31core.grading.second_opinion import grade_with_math_verify
    from k31core.grading.symbolic import grade_pairs

    try:
        if request["kind"] == "pairs":
            return grade_pairs([(truth, answer) for truth, answer in request["pairs"]])
        if refusal(request["text"]) or refusal(request["label"]):
            return Outcome(0, GradeReason.REFUSED)
        return grade_with_math_verify(request["text"], request["label"])
    except TooLarge:
        return Outcome(0, GradeReason.REFUSED)
    except Exception:  # whatever sympy raises for this text: this answer's fault, and no reason to lose the worker
        return Outcome(0, GradeReason.GRADER_ERROR)


def _lower_limits(limits: WorkerLimits) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    space = used + limits.memory_mb * (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.setrecursionlimit(3_000)


def _start_cpu_clock(limits: WorkerLimits) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime + limits.cpu_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
