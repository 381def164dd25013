"""`k31 plan`: what a recipe needs, on any machine, before a cluster is booked."""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe name (see `k31 recipes`) or a .yaml file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: train.parallel.pp=8. May be repeated.")
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Take the sizes from this checkpoint's config.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (bytes) instead of tables.")] = False,
) -> None:
    """Build every rank of a recipe without memory or cards, and add up what it needs.

    The real model code runs on torch's meta device with the published sizes. Weights, adapter and optimizer are exact
    counts; activations and workspace are formulas. Exit code 3 when something does not fit.
    """
    import json

    from rich.console import Console

    from k31core.model.config import load_config
    from k31core.plan.plan import make_plan
    from k31core.plan.table import print_plan
    from k31core.recipe.load import load_recipe

    config = load_config(model_dir) if model_dir is not None else None
    result = make_plan(load_recipe(recipe, overrides or ()), config)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
    else:
        print_plan(result, Console())
    if result.problems:
        raise typer.Exit(3)
