"""`k31 train`: the whole thing in one command."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Option(help="Recipe name (see `k31 recipes`) or a .yaml file.")] = "tiny",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, e.g. rollout.temperature=0.8.")] = None,
    save_dir: Annotated[Path, typer.Option(help="Where run directories are made.")] = Path("runs"),
    run_id: Annotated[
        str | None, typer.Option(help="Name of the run; made from recipe and time when left out.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[RUN]", help="Continue a run: its name, or nothing for the newest unfinished."),
    ] = None,
    num_rollout: Annotated[int | None, typer.Option(help="Steps of the run (instead of the recipe's).")] = None,
    skip_saving: Annotated[bool, typer.Option("--skip-saving", help="Never save adapters.")] = False,
    prefect_port: Annotated[
        int | None, typer.Option(help="Port of the local Prefect server; chosen when left out.")
    ] = None,
    ray_port: Annotated[int | None, typer.Option(help="Port of the local Ray head; chosen when left out.")] = None,
) -> None:
    """Train a recipe, or continue a run: services, preparation, cluster, loop, report.

    Starts a local Prefect server and Ray on loopback where none is running and leaves them up (`k31 down` stops them).
    Ctrl-C commits what is whole; the same command with --resume continues.
    """
    from k31core.cli.session import Order, run_order

    order = Order(
        recipe=recipe,
        overrides=tuple(set_ or ()),
        save_dir=save_dir.absolute(),
        run_id=run_id,
        resume=resume,
        num_rollout=num_rollout,
        skip_saving=skip_saving,
        prefect_port=prefect_port,
        ray_port=ray_port,
    )
    raise typer.Exit(run_order(order))
