"""Append-only JSON lines that survive a kill: every line is fsynced, a torn last line is dropped with a note."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JournalError(ValueError):
    """A journal that cannot be read or written: names the file, and the line."""


def read_lines(path: Path) -> tuple[list[Record], str | None]:
    """All whole records of `path`, and a note when its last line is torn (a kill in the middle of a write).

    A missing file is empty. Raises JournalError for a bad line that is not the last one: that is damage, not a kill.
    """
    if not path.exists():
        return [], None
    records: list[Record] = []
    note = None
    lines = path.read_bytes().split(b"\n")
    tail = lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise JournalError(
                f"{path} line {number} is not JSON ({error}); the file was damaged after it was written: restore it "
                f"from a copy, or delete this line if its step can be repeated"
            ) from error
        if not isinstance(record, dict):
            raise JournalError(f"{path} line {number} holds a {type(record).__name__}, expected an object")
        records.append(record)
    if tail:
        note = f"{path.name}: dropped a torn last line of {len(tail)} bytes (the writer was killed in the middle)"
    return records, note


class Journal:
    """One JSON-lines file with a single writer (the holder of the run's lock)."""

    def __init__(self, path: Path) -> None:
        """Read what is there; `note` says what was repaired, None when nothing was."""
        self.path = path
        self.records, self.note = read_lines(path)
        if self.note:
            self._truncate_tail()

    def _truncate_tail(self) -> None:
        with self.path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            os.fsync(file.fileno())

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; they are on disk when this returns."""
        new = [dict(record) for record in records]
        if not new:
            return
        fresh = not self.path.exists()
        length = 0 if fresh else self.path.stat().st_size
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(encode(record) for record in new))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._cut(length)
            raise JournalError(
                f"{self.path} cannot be written ({error.strerror}): free some space or make it writable, and continue "
                f"the run; its {len(self.records)} lines are intact"
            ) from error
        if fresh:
            fsync_directory(self.path.parent)
        self.records.extend(new)

    def _cut(self, length: int) -> None:
        """Take back a line that was written in part: another one behind it would make it damage."""
        with suppress(OSError):  # a file that cannot be opened has nothing of it
            os.truncate(self.path, length)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self.extend([record])

    def replace(self, stale: Callable[[Record], bool], records: Iterable[Mapping[str, Any]]) -> None:
        """Drop the records that `stale` names and append `records`, as one atomic change."""
        kept = [record for record in self.records if not stale(record)]
        new = [dict(record) for record in records]
        if len(kept) == len(self.records):
            self.extend(new)
            return
        write_atomic(self.path, b"".join(encode(record) for record in kept + new))
        self.records = kept + new


def encode(record: Mapping[str, Any]) -> bytes:
    """One line. NaN and infinities are written as JSON extensions that Python reads back."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` with `content`: afterwards either the old or the new bytes are there, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Make a rename or a new name in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
