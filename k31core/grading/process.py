"""The parent's side of the grader processes: the template that forks them, and one worker with its deadline."""

import array
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from k31core.grading.limits import MAX_LINE_BYTES, MAX_REPLY_BYTES, WorkerLimits
from k31core.grading.verdict import Outcome
from k31core.rl.types import GradeReason

_START_LIMIT_S = 120.0
_CONTROL_LIMIT_S = 30.0
_REQUESTS_PER_WORKER = 2_000
"""A worker is replaced after so many answers: sympy's caches grow."""

_TIMED_OUT = Outcome(0, GradeReason.TIMED_OUT)
_GRADER_ERROR = Outcome(0, GradeReason.GRADER_ERROR)


class GraderStartError(RuntimeError):
    """The grader processes cannot be started: an installation fault, not a fault of an answer."""


class Template:
    """The template process and its control socket. Thread-safe; starts again when it was lost."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._ready = False
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[2])
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        environment = {**kept, "PYTHONPATH": root, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        limits = (str(self.limits.wall_s), str(self.limits.cpu_s), str(self.limits.memory_mb))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "k31core.grading.template", str(theirs.fileno()), *limits],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._ready = False

    def fork(self) -> tuple[int, socket.socket]:
        """A fresh worker: its process id and our end of its socket. Raises GraderStartError."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader pool is closed")
            self._wait_until_ready()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                attached = array.array("i", [theirs.fileno()])
                self._control.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, attached)])
                return int(self._reply()), ours

    def end(self, pid: int) -> int | None:
        """Kills worker `pid` if it still runs; its wait status, or None when the template is gone (and it with it)."""
        with self._lock:
            if self._closed:
                return None
            try:
                self._control.send(f"end {pid}".encode())
                return int(self._reply())
            except (OSError, GraderStartError):
                return None

    def close(self) -> None:
        """Closes the control socket: the template ends its workers and itself."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._control.close()
            if not self._ready:
                self._process.kill()  # still importing: it has no workers yet
            try:
                self._process.wait(timeout=_CONTROL_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()

    def _wait_until_ready(self) -> None:
        if self._ready and self._process.poll() is not None:  # lost: killed by hand, or the machine ran out of memory
            self._control.close()
            self._start()
        if not self._ready:
            self._control.settimeout(_START_LIMIT_S)
            self._reply()
            self._control.settimeout(_CONTROL_LIMIT_S)
            self._ready = True

    def _reply(self) -> bytes:
        try:
            message = self._control.recv(64)
        except TimeoutError:
            message = b""
        if message:
            return message
        self._process.kill()
        _, errors = self._process.communicate()
        lines = errors.decode(errors="replace").strip().splitlines() if errors else []
        raise GraderStartError(
            f"the grader template process does not answer (exit {self._process.returncode}): "
            f"{lines[-1] if lines else 'no message'}; check that sympy and math-verify import in this environment"
        )


class WorkerProcess:
    """One worker, asked from one thread. It is forked when first needed and again after each loss."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._pid = 0
        self._socket: socket.socket | None = None
        self._asked = 0
        self.kills = 0
        self.crashes = 0
        self.slowest_s = 0.0
        """The longest that one answer took, from the question to its verdict (its worker's end included)."""

    def ask(self, request: dict[str, Any]) -> Outcome:
        """The worker's outcome for `request`; at a limit, the worker is replaced and the outcome says why.

        Raises GraderStartError when no worker can be had.
        """
        line = json.dumps(request).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            return Outcome(0, GradeReason.REFUSED)
        if self._socket is None:
            self._pid, self._socket = self._template.fork()
            self._asked = 0
        asked = time.monotonic()
        try:
            return self._answer(self._socket, line, request["id"], asked + self._template.limits.wall_s)
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - asked)

    def _answer(self, connection: socket.socket, line: bytes, number: int, deadline: float) -> Outcome:
        try:
            reply = _exchange(connection, line, deadline)
        except TimeoutError:
            self.kills += 1
            self.end()
            return _TIMED_OUT
        except OSError:
            reply = b""
        outcome = _outcome(reply, number)
        if outcome is None:
            return self._lost()
        self._asked += 1
        if self._asked >= _REQUESTS_PER_WORKER:
            self.end()
        return outcome

    def end(self) -> int | None:
        """Ends the worker; its wait status. The next question forks another."""
        if self._socket is None:
            return None
        self._socket.close()
        self._socket = None
        return self._template.end(self._pid)

    def _lost(self) -> Outcome:
        """The worker ended by itself, or answered nonsense."""
        status = self.end()
        if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            self.kills += 1
            return _TIMED_OUT
        self.crashes += 1
        return _GRADER_ERROR


def _exchange(connection: socket.socket, line: bytes, deadline: float) -> bytes:
    """Sends a line, returns the reply line (empty when the worker is gone). Raises TimeoutError at the deadline."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.sendall(line)
    reply = b""
    while not reply.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(MAX_REPLY_BYTES)
        reply += part
        if not part or len(reply) > MAX_REPLY_BYTES:
            return b""
    return reply


def _outcome(reply: bytes, number: int) -> Outcome | None:
    """The outcome that a reply spells; None for anything that is not exactly a reply to request `number`."""
    try:
        fields = json.loads(reply)
        if set(fields) != {"id", "score", "reason"} or fields["id"] != number or fields["score"] not in (0, 1):
            return None
        return Outcome(int(fields["score"]), GradeReason(fields["reason"]))
    except (ValueError, TypeError):
        return None
