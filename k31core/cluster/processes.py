"""Processes that we started: detached, with a log file, named by pid and start time, stopped with their children."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


class ServiceError(ValueError):
    """A local service that does not come up or cannot be used: names the service, the cause and the next step."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process that we may stop. The start time tells it from a later process with the same number."""

    pid: int
    started: float
    """Seconds since the epoch, as the kernel tells."""

    def as_json(self) -> dict[str, float]:
        """Plain values for `services.json`."""
        return asdict(self)


def start_detached(
    command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session with both outputs in `log`; it outlives us."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )


def record_of(pid: int) -> ProcessRecord | None:
    """The record of a living process, None when there is none."""
    try:
        return ProcessRecord(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def is_alive(record: ProcessRecord) -> bool:
    """True while exactly this process runs (a zombie does not)."""
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def with_children(records: Iterable[ProcessRecord]) -> list[psutil.Process]:
    """The living processes among `records` and everything they started."""
    found: dict[int, psutil.Process] = {}
    for record in records:
        if not is_alive(record):
            continue
        try:
            process = psutil.Process(record.pid)
            for item in [process, *process.children(recursive=True)]:
                found[item.pid] = item
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def stop(records: Iterable[ProcessRecord], *, grace_s: float = 10.0) -> int:
    """Ask the processes and their children to end, then make them; returns how many there were."""
    processes = with_children(records)
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(processes, timeout=grace_s)
    for process in stubborn:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=5)
    return len(processes)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def processes_mentioning(text: str) -> list[ProcessRecord]:
    """Processes of this user whose command line holds `text` (a private directory of ours)."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "uids", "create_time"]):
        info = process.info
        mine = info["uids"] is not None and info["uids"].real == os.getuid()
        if mine and process.pid != os.getpid() and any(text in part for part in info["cmdline"] or ()):
            found.append(ProcessRecord(info["pid"], info["create_time"]))
    return found


def memory_pss_bytes(records: Iterable[ProcessRecord]) -> int:
    """Proportional memory of the processes and their children: shared pages counted once."""
    total = 0
    for process in with_children(records):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def free_port(preferred: int = 0) -> int:
    """A port on loopback that nobody listens on: `preferred` when it is free, otherwise any."""
    for port in (preferred, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServiceError("no free port on 127.0.0.1: stop something that listens there")


def require_free_port(port: int, what: str, option: str) -> None:
    """Raise ServiceError when somebody already listens on the port that the user asked for."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServiceError(
                f"port {port} for {what} is in use on 127.0.0.1 ({error.strerror}): stop what listens there, give "
                f"another port with {option}, or leave the option out to have a free one chosen"
            ) from error


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log, for an error message."""
    if not log.is_file():
        return "(no log)"
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
