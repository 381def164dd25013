"""A server process on this machine: started, waited for, stopped; its log speaks when it fails."""

import asyncio
import ctypes
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from k31core.rollout.engine import EngineError
from k31core.rollout.engines.sglang.client import SglangClient

_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 64 * 1024
_REASON = re.compile(r"(?:Error|Exception|error:|CUDA|NCCL WARN|Killed|out of memory)")


class LaunchError(EngineError):
    """A server that did not come up: names the command, the reason from its log and the log's path."""


class ServerProcess:
    """One `sglang.launch_server` and its children, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, what: str) -> None:
        self._process, self.log, self._what = process, log, what

    @classmethod
    def start(
        cls, args: Sequence[str], environment: Mapping[str, str], log: Path, *, what: str, python: str | None = None
    ) -> Self:
        """Start `python -m sglang.launch_server` with its output in `log`."""
        command = [python or sys.executable, "-m", "sglang.launch_server", *args]
        return cls.start_command(command, environment, log, what=what)

    @classmethod
    def start_command(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path, *, what: str = "SGLang"
    ) -> Self:
        """Start any command that serves the same protocol."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            try:
                process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=dict(environment), start_new_session=True, preexec_fn=_end_with_parent(os.getpid()),
                )  # fmt: skip
            except OSError as error:
                raise LaunchError(
                    f"{what}: cannot run {command[0]} (rollout.engine.python): {error.strerror}"
                ) from error
        return cls(process, log, what)

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def reason(self) -> str:
        """What the log says about the end."""
        return reason_in_log(_tail(self.log))

    async def wait_healthy(self, client: SglangClient, timeout_s: float) -> float:
        """Wait until it answers; returns the seconds. Raises LaunchError when it ends or the time is over."""
        started, last = time.monotonic(), "no answer yet"
        while True:
            code = self.exit_code
            waited = time.monotonic() - started
            if code is not None:
                raise LaunchError(
                    f"{self._what} ended with exit code {code} after {waited:.0f} s: {self.reason()} (log: {self.log})"
                )
            problem = await client.healthy()
            if problem is None:
                return waited
            last = problem
            if waited > timeout_s:
                raise LaunchError(
                    f"{self._what} did not answer within {timeout_s:g} s (rollout.engine.startup_timeout_s): {last}; "
                    f"its log ends with: {self.reason()} (log: {self.log})"
                )
            await asyncio.sleep(min(_POLL_S, max(0.05, timeout_s - waited)))

    async def stop(self, grace_s: float = 30.0) -> None:
        """End the whole group: asked first, then killed. Idempotent."""
        children = _group(self.pid)
        _signal_group(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and (self.exit_code is None or any(_alive(c) for c in children)):
            await asyncio.sleep(0.05)
        _signal_group(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Runs in the child: ask the kernel to end it when we die, even by SIGKILL, so that no card stays occupied.

    The kernel watches the thread that starts the child: start servers from a thread that lives as long as the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # died in between
            os._exit(1)

    return prepare


def require_free_port(host: str, port: int) -> None:
    """Raise LaunchError naming port and, where visible, the process that has it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(f"cannot listen on {host}:{port} (rollout.engine.host): {error.strerror}") from error
            raise LaunchError(
                f"port {port} is taken{_owner(port)}: end that process, or set rollout.engine.port"
            ) from error


def reason_in_log(text: str) -> str:
    """The last error of a log, or its last line: what a person would look for first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    errors = [line for line in lines if _REASON.search(line) and not line.startswith(("File ", "INFO"))]
    return (errors[-1] if errors else lines[-1])[:600]


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f" by process {connection.pid} ({name})"
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return ""
    return ""


def _group(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
