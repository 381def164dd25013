"""Read a run directory for the report: metrics, resolved recipe, ledger. Torch-free, read-only."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.recipe.load import ResolvedRecipe, read_resolved


class ReportError(ValueError):
    """A run directory that cannot be reported on: names the file, the line and what to do."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over steps; `steps` and `values` have equal length, non-finite values are left out."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    def mean_of(self, first: int | None = None, last: int | None = None) -> float:
        """Mean of the first or last n values (nan when there are none)."""
        chosen = self.values[:first] if first is not None else self.values[-last:] if last else self.values
        return sum(chosen) / len(chosen) if chosen else math.nan


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything the report draws."""

    run_dir: Path
    resolved: ResolvedRecipe
    rows: tuple[dict[str, Any], ...]
    """Objects of `metrics.jsonl`, by rising step; the last one written for a step counts."""

    @property
    def steps_done(self) -> int:
        """Number of the last step; step 0 is the evaluation before the first."""
        return int(self.rows[-1]["step"])

    def series(self, name: str) -> Series:
        """The metric `name` over steps, where it was recorded and is finite."""
        points = [
            (int(row["step"]), float(row[name]))
            for row in self.rows
            if isinstance(row.get(name), int | float) and math.isfinite(row[name])
        ]
        return Series(name, tuple(s for s, _ in points), tuple(v for _, v in points))

    def names(self, prefix: str) -> list[str]:
        """Names of numeric metrics that start with `prefix`, sorted."""
        found = {k for row in self.rows for k, v in row.items() if k.startswith(prefix) and isinstance(v, int | float)}
        return sorted(found)


def read_run(run_dir: Path) -> RunRecord:
    """Read `recipe.json` and `metrics.jsonl` of a run.

    A torn last line (the writer was killed) is left out; any other malformed line is an error with its number.
    Raises RecipeError for a missing recipe, ReportError for missing or malformed metrics.
    """
    resolved = read_resolved(run_dir / "recipe.json")
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ReportError(f"{path} is missing: the run has not finished a step yet; nothing to report")
    by_step: dict[int, dict[str, Any]] = {}
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline after it: torn by a kill, its step will be written again
                break
            raise ReportError(f"{path}, line {number}: not JSON ({error}); restore the file or cut the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ReportError(f"{path}, line {number}: no integer `step`; one object a step is expected")
        by_step[row["step"]] = {**by_step.get(row["step"], {}), **row}
    if not by_step:
        raise ReportError(f"{path} holds no step yet; nothing to report")
    return RunRecord(run_dir, resolved, tuple(by_step[step] for step in sorted(by_step)))
