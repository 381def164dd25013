"""Which commits may go: the last few and every Nth stay, and so does everything a resume would need."""

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path


def steps_to_keep(
    steps: Collection[int], *, keep_last: int, keep_every: int, protected: Collection[int] = ()
) -> set[int]:
    """Steps that stay: the newest `keep_last`, every `keep_every`th (0: none) and `protected`."""
    newest = set(sorted(steps)[-keep_last:])
    regular = {step for step in steps if keep_every and step % keep_every == 0}
    return (newest | regular | set(protected)) & set(steps)


def remove_directories(directories: Iterable[Path]) -> list[Path]:
    """Delete committed directories. Each loses its manifest first, so a kill in between leaves nothing half-valid."""
    removed = []
    for directory in directories:
        (directory / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(directory)
        removed.append(directory)
    return removed
