"""`k31 eval`: the newest save of a run on its held-out set."""

from pathlib import Path
from typing import Annotated

import typer


def eval(
    run: Annotated[str, typer.Argument(help="Run name, or `latest` for the newest unfinished one.")] = "latest",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, e.g. eval.samples_per_prompt=8.")] = None,
    save_dir: Annotated[Path, typer.Option(help="Where run directories are.")] = Path("runs"),
) -> None:
    """Serve the newest valid save of a run and evaluate it on the recipe's held-out set; prints the metrics.

    The graded answers are kept as a table under eval/ in the run directory.
    """
    from k31core.cli.session import Order, run_order

    order = Order(
        recipe="", overrides=tuple(set_ or ()), save_dir=save_dir.absolute(), run_id=None, resume=run, num_rollout=None
    )
    raise typer.Exit(run_order(order, stage="eval"))
