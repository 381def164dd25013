"""`k31 report`: the picture and the page of a run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory, as printed by `k31 train` (<save-dir>/<run-id>).")],
) -> None:
    """Draw a run: reward, length, agreement, gradient norm, score-centering health, time and memory.

    Works on a finished, a running or a stopped run. Writes report/report.png and report/report.html there.
    """
    from rich.console import Console
    from rich.table import Table

    from k31core.report.report import summarise, write_report

    paths = write_report(run)
    table = Table("", "value", "note", title=f"run {run.name}", title_justify="left")
    styles = {"good": "green", "watch": "bold red", "plain": ""}
    for line in summarise(run):
        table.add_row(
            line.what, f"[{styles[line.mark]}]{line.value}[/]" if styles[line.mark] else line.value, line.note
        )
    console = Console()
    console.print(table)
    console.print(f"picture {paths['png']}\npage    {paths['html']}", highlight=False, soft_wrap=True)
