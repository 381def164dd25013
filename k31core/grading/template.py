"""The process that grader workers are forked from: imports sympy and math-verify once, then forks, kills and reaps.

Starting an interpreter with sympy takes two seconds, a fork a few milliseconds, so a killed worker is replaced at once.
The template itself never sees an answer. Started by `pool.py` as `python -m k31core.grading.template FD WALL CPU MB`;
it serves one message at a time on the control socket FD, and ends its workers and itself when that socket closes:

- `fork`, with one end of a worker's socket attached: replies with the process id
- `end PID`: kills and reaps that worker, replies with its wait status (an exit by itself shows how it ended)
"""

import array
import gc
import os
import signal
import socket
import sys
from contextlib import suppress

from k31core.grading.limits import WorkerLimits
from k31core.grading.worker import serve

_WARM_UP = (
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{x^2+\\sqrt{3}}", "\\sqrt{3}+x^2"),
    ("$(1,2]$", "(1,2]"),
    ("$x<3$", "3>x"),
    ("$(-\\infty,3)$", "x<3"),
    ("$x^2=4$", "x=2"),
    ("$\\{1,2\\}$", "2,1"),
    ("answer: 1/2+1", "1.5"),
)
_WARM_UP_PAIRS = (
    ("2sqrt(3)", "sqrt(12)"),
    ("x^2-1", "(x-1)(x+1)"),
    ("0.1+0.2", "0.3"),
    ("ln(4)", "2ln(2)"),
    ("pi/2", "0.5pi"),
)


def main() -> None:
    """Entry point of the template process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    limits = WorkerLimits(wall_s=float(sys.argv[2]), cpu_s=float(sys.argv[3]), memory_mb=int(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # a worker that imports late may write no file
    _warm_up()
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    workers: set[int] = set()
    try:
        _serve_control(control, limits, workers)
    finally:
        for pid in workers:
            _end(pid)


def _serve_control(control: socket.socket, limits: WorkerLimits, workers: set[int]) -> None:
    while True:
        message, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(4))
        if not message:
            return
        if message == b"fork":
            descriptor = array.array("i", ancillary[0][2])[0]
            pid = os.fork()
            if pid == 0:
                control.close()
                _be_worker(descriptor, limits)
            os.close(descriptor)
            workers.add(pid)
            control.send(str(pid).encode())
        else:
            pid = int(message.split()[1])
            workers.discard(pid)
            control.send(str(_end(pid)).encode())


def _be_worker(descriptor: int, limits: WorkerLimits) -> None:
    status = 1
    try:
        silence = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(silence, standard)
        serve(socket.socket(fileno=descriptor), limits)
        status = 0
    finally:
        os._exit(status)


def _end(pid: int) -> int:
    """Kills and reaps a worker; its wait status. A worker that ended by itself keeps its own status."""
    finished, status = os.waitpid(pid, os.WNOHANG)
    if finished == pid:
        return status
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _warm_up() -> None:
    """Runs every kind of comparison once, so that nothing is imported or compiled after the fork."""
    from k31core.grading.second_opinion import grade_with_math_verify
    from k31core.grading.symbolic import grade_pairs

    for text, label in _WARM_UP:
        grade_with_math_verify(text, label)
    for pair in _WARM_UP_PAIRS:
        grade_pairs([pair])


if __name__ == "__main__":
    main()
