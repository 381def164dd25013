"""The whole check of one directory, as `k31 verify-model` and preparation do it: manifest, digests, structure."""

import errno
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k31core.checkpoint.verify_files import (
    FileEntry,
    Problem,
    check_entries,
    entries_found,
    read_manifest,
    structure_problems,
    write_manifest,
)

Bar = Callable[[int, int], None]
"""Told (bytes checked, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check found."""

    directory: Path
    repo: str | None
    commit: str | None
    files: int
    total_bytes: int
    hashed_bytes: int
    believed_files: int
    unvouched_files: int
    extra_files: tuple[str, ...]
    """Files that the manifest does not know: not checked."""
    problems: tuple[Problem, ...]
    recorded: bool
    """The manifest was brought up to date; False when something is wrong, or the directory is read-only."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "directory": str(self.directory), "ok": not self.problems}

    def lines(self) -> list[str]:
        """The report for a reader."""
        origin = f"{self.repo} at {self.commit}" if self.commit else "no record of where the files come from"
        rate = self.hashed_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0
        lines = [
            f"{self.directory}: {self.files} files, {self.total_bytes / 1e9:.3f} GB ({origin})",
            f"hashed {self.hashed_bytes / 1e9:.3f} GB in {self.seconds:.1f} s ({rate:.2f} GB/s); {self.believed_files} "
            "files believed by size and time",
        ]
        if self.unvouched_files:
            lines.append(
                f"{self.unvouched_files} files have no digest from the Hub: their structure is checked and their "
                "digests are recorded here"
            )
        if self.extra_files:
            more = f" and {len(self.extra_files) - 5} more" if len(self.extra_files) > 5 else ""
            lines.append(f"not in the manifest, not checked: {', '.join(self.extra_files[:5])}{more}")
        lines += [f"WRONG {problem.path}: {problem.detail}" for problem in self.problems]
        if self.problems:
            lines.append("download again: wrong files are set aside and fetched anew, right ones are kept")
        else:
            lines.append(
                "all right" if self.recorded else "all right; the directory is read-only, so no record is kept"
            )
        return lines


def verify_directory(directory: Path, *, full: bool, workers: int | None = None, bar: Bar | None = None) -> Verified:
    """Checks a directory and brings its manifest up to date when all is right.

    Raises FilesError for a directory that is not there, holds nothing, or has a damaged manifest.
    """
    started = time.monotonic()
    found = {entry.path: entry for entry in entries_found(directory)}
    known = read_manifest(directory)
    entries = known[1] if known else list(found.values())
    total = sum(entry.size for entry in entries)
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count  # a lost update between threads would only misplace the bar
        if bar is not None:
            bar(min(done, total), total)

    report = check_entries(directory, entries, full=full, workers=workers, progress=progress)
    seen = {problem.path for problem in report.problems}
    structural = tuple(problem for problem in structure_problems(directory) if problem.path not in seen)
    problems = (*report.problems, *structural)
    facts = known[0] if known else {"repo": None, "repo_type": None, "revision": None, "commit": None}
    recorded = not problems and _record(directory, facts, report.entries)
    return Verified(
        directory=directory,
        repo=facts.get("repo"),
        commit=facts.get("commit"),
        files=len(entries),
        total_bytes=total,
        hashed_bytes=report.hashed_bytes,
        believed_files=report.believed_files,
        unvouched_files=report.unvouched_files,
        extra_files=tuple(sorted(set(found) - {entry.path for entry in entries})),
        problems=problems,
        recorded=recorded,
        seconds=time.monotonic() - started,
    )


def _record(directory: Path, facts: dict[str, Any], entries: tuple[FileEntry, ...]) -> bool:
    try:
        write_manifest(directory, facts, entries)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return False
    return True
