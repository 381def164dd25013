"""One conversion at a time in a target directory; the kernel lets go of the lock when its holder dies."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from k31core.convert.source import ConvertError


class TargetLock:
    """An advisory lock (flock) on a file inside the target; as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read() or "another process"
            self._file.close()
            raise ConvertError(f"{self._path.parent.parent} is being converted by {holder}: wait for it") from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
