"""Signs of life of the workers: one small file each in the run directory, read by whoever waits for them.

A worker whose main thread is stuck in a collective cannot be asked; what it last wrote can be read.
"""

import json
import os
import time
from pathlib import Path

FOLDER = "progress"
"""Inside the run directory."""
_INTERVAL_S = 1.0


class ProgressFile:
    """Written by one worker; a note costs a file rename at most once a second."""

    def __init__(self, run_dir: Path, worker: str, *, interval_s: float = _INTERVAL_S) -> None:
        """worker: `trainer-3`, `engine`."""
        self._path = run_dir / FOLDER / f"{worker}.json"
        self._interval_s = interval_s
        self._count, self._written = 0, -interval_s

    def note(self, what: str) -> None:
        """Something was finished; `what` is shown when nothing else follows. Several notes within a second are one."""
        self._count += 1
        now = time.monotonic()
        if now - self._written < self._interval_s:
            return
        self._written = now
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"count": self._count, "pid": os.getpid(), "what": what}), encoding="utf-8")
        temporary.replace(self._path)


def read_signs(run_dir: Path) -> dict[str, str]:
    """Worker → its last note as text; it changes with every note. Files that vanish or are torn are left out."""
    signs = {}
    for path in (run_dir / FOLDER).glob("*.json"):
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            signs[path.stem] = f"{note['what']} (note {note['count']} of process {note['pid']})"
        except (OSError, ValueError, KeyError):
            continue
    return signs
