"""`k31 grade`: audit a reward before training on it."""

import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class GraderChoice(StrEnum):
    """What `--grader` takes."""

    DEEPSCALER = "deepscaler"
    MATH_VERIFY = "math-verify"
    BOTH = "both"


def grade(
    file: Annotated[Path, typer.Argument(help='JSON lines with "response" and "label"; - reads standard input.')],
    grader: Annotated[GraderChoice, typer.Option(help="Which verdicts to give; the other one is null.")] = (
        GraderChoice.BOTH
    ),
    workers: Annotated[int, typer.Option(min=1, help="Grader processes.")] = 2,
    wall_limit_s: Annotated[float, typer.Option(help="Seconds for one answer before its process is killed.")] = 5.0,
    memory_limit_mb: Annotated[int, typer.Option(help="Memory for one answer, in MiB.")] = 1024,
    summary: Annotated[bool, typer.Option(help="Counts and rates on standard error at the end.")] = True,
) -> None:
    """Grade answers as training would, and print one JSON line a row.

    Each line is {"row", "deepscaler", "math_verify", "reason"}: row counts from 0, verdicts are 0, 1 or null (not
    asked), reason says why: correct, wrong, no_think_end (neither </think> nor ###Response), no_box (no \\boxed{} after
    the thinking), timed_out, grader_error, refused (too large to evaluate). A fault of any grader comes first, since it
    explains a 0; otherwise it is the reason of deepscaler, if that was asked.

    Answers are never executed: they are graded in processes with limits of time and memory.
    """
    from k31core.grading.grade_rows import Audit, GradeFileError, check_row, grade_rows

    def rows() -> Iterator[Any]:
        name = "standard input" if str(file) == "-" else str(file)
        try:
            stream = sys.stdin.buffer if str(file) == "-" else file.open("rb")
        except OSError as error:
            raise GradeFileError(f"{name}: cannot be read ({error.strerror}); name a file of JSON lines") from error
        with stream:
            for number, line in enumerate(stream, start=1):
                yield check_row(line, f"{name}:{number}")

    audit = Audit()
    for result in grade_rows(
        rows(), graders=(grader.value,), workers=workers, wall_limit_s=wall_limit_s, memory_limit_mb=memory_limit_mb
    ):
        print(json.dumps(result))
        audit.add(result)
    if audit.rows == 0:
        raise GradeFileError(f"{file}: no rows; give JSON lines with `response` and `label`")
    if summary:
        print(audit.text(), file=sys.stderr)
