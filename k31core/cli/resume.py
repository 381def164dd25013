"""`k31 resume`: continue a run."""

from pathlib import Path
from typing import Annotated

import typer


def resume(
    run: Annotated[str, typer.Argument(help="Run name, or `latest` for the newest unfinished one.")] = "latest",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override of a field that a run may change.")] = None,
    save_dir: Annotated[Path, typer.Option(help="Where run directories are.")] = Path("runs"),
    num_rollout: Annotated[int | None, typer.Option(help="New number of steps.")] = None,
) -> None:
    """Continue a run from its newest valid commit (the same as `k31 train --resume RUN`)."""
    from k31core.cli.session import Order, run_order

    order = Order(
        recipe="",
        overrides=tuple(set_ or ()),
        save_dir=save_dir.absolute(),
        run_id=None,
        resume=run,
        num_rollout=num_rollout,
    )
    raise typer.Exit(run_order(order))
