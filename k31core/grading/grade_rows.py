"""Grades rows of a file in their order, a bounded number at a time, and counts what came out."""

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from k31core.grading.pool import GraderPool
from k31core.grading.verdict import reason_to_show

_BATCH = 256


class GradeFileError(ValueError):
    """A file of answers that cannot be graded: names file and line."""


def check_row(line: bytes, place: str) -> tuple[str, str]:
    """(response, label) of a JSON line. Raises GradeFileError that names `place`."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise GradeFileError(f"{place}: invalid UTF-8 at byte {error.start} of the line") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise GradeFileError(f"{place}: not a JSON object ({error})") from error
    if not isinstance(record, dict):
        raise GradeFileError(f"{place}: a row is a {type(record).__name__}, expected an object")
    for name in ("response", "label"):
        if not isinstance(record.get(name), str):
            kind = type(record[name]).__name__ if name in record else "missing"
            raise GradeFileError(f'{place}: `{name}` is {kind}, expected a string (labels too: "34", not 34)')
    return record["response"], record["label"]


def grade_rows(
    rows: Iterable[tuple[str, str]],
    *,
    graders: tuple[str, ...],
    workers: int,
    wall_limit_s: float,
    memory_limit_mb: int,
) -> Iterator[dict[str, Any]]:
    """`{"row", "deepscaler", "math_verify", "reason"}` of every row, in order; rows are read as they are needed."""
    with GraderPool(
        workers=workers, wall_limit_s=wall_limit_s, cpu_limit_s=wall_limit_s, memory_limit_mb=memory_limit_mb
    ) as pool:
        number = 0
        for batch in _batches(rows):
            for verdict in pool.grade_many(batch, graders=graders):
                yield {
                    "row": number,
                    "deepscaler": verdict.deepscaler,
                    "math_verify": verdict.math_verify,
                    "reason": reason_to_show(verdict).value,
                }
                number += 1


def _batches(rows: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: deque[tuple[str, str]] = deque()
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield list(batch)
            batch.clear()
    if batch:
        yield list(batch)


@dataclass(slots=True)
class Audit:
    """Counts over graded rows."""

    rows: int = 0
    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    disagreements: int = 0

    def add(self, result: dict[str, Any]) -> None:
        """Counts one row."""
        self.rows += 1
        self.reasons[result["reason"]] += 1
        for name in ("deepscaler", "math_verify"):
            if result[name] is not None:
                self.asked[name] += 1
                self.right[name] += result[name]
        if None not in (result["deepscaler"], result["math_verify"]):
            self.disagreements += result["deepscaler"] != result["math_verify"]

    def text(self) -> str:
        """Two lines for a reader."""
        rates = [f"{name} {self.right[name] / self.asked[name]:.4f}" for name in self.asked]
        if len(self.asked) == 2:
            rates.append(f"disagreement {self.disagreements / self.rows:.4f}")
        reasons = ", ".join(f"{name} {count}" for name, count in self.reasons.most_common())
        return f"{self.rows} rows: {', '.join(rates)}\n{reasons}"
