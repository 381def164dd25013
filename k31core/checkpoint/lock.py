"""The lock of a run directory: one process at a time, and the loser learns who holds it."""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self


class LockedError(ValueError):
    """Another process works on this run directory; names it."""


class RunLock:
    """An advisory lock (flock) that the kernel releases when its holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        """`path` is the lock file; it is created and never removed (removing it would let two holders in)."""
        self.path = path
        self._file: IO[bytes] | None = None

    def acquire(self) -> None:
        """Take the lock or raise LockedError at once, naming the holder."""
        file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = _describe(file.read().decode(errors="replace"))
            file.close()
            raise LockedError(
                f"run directory {self.path.parent} is in use by {holder}; "
                "wait for it, stop it, or give another --run-id"
            ) from error
        self._file = file
        with suppress(OSError):  # a full disk: the lock holds all the same, only our name is not in it
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}).encode())

    def release(self) -> None:
        """Give the lock back; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder(path: Path) -> str | None:
    """Who holds the lock now; None when nobody does. Takes and drops the lock to find out."""
    if not path.exists():
        return None
    with path.open("r", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _describe(file.read())
    return None


def _describe(text: str) -> str:
    try:
        record: dict[str, Any] = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
        return f"process {record['pid']} on {record['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process (its name is not readable)"
