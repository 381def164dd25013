"""Write the report of a run: `report/report.png` and `report/report.html` in its run directory."""

import os
from pathlib import Path

from k31core.report.figure import draw
from k31core.report.health import Statement, statements
from k31core.report.page import write_page
from k31core.report.read import read_run


def write_report(run_dir: Path) -> dict[str, str]:
    """Draw the picture and the page from what the run directory holds now.

    Returns the two paths as `{"png": …, "html": …}`. Both are replaced in one rename each, so that a page open in
    a browser is never half-written. Raises ReportError or RecipeError for a directory that is not a run.
    """
    run = read_run(run_dir)
    out = run_dir / "report"
    out.mkdir(exist_ok=True)
    picture, page = out / "report.png", out / "report.html"
    unfinished_png, unfinished_html = out / ".report.tmp.png", out / ".report.tmp.html"
    draw(run, unfinished_png)
    write_page(run, statements(run), unfinished_png, unfinished_html)
    os.replace(unfinished_png, picture)
    os.replace(unfinished_html, page)
    return {"png": str(picture), "html": str(page)}


def summarise(run_dir: Path) -> list[Statement]:
    """The summary statements of a run, for a terminal table."""
    return statements(read_run(run_dir))
