"""`k31 show`: a resolved recipe."""

from typing import Annotated

import typer


def show(
    recipe: Annotated[str, typer.Argument(help="Recipe name, a .yaml file, or a run directory.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, e.g. rollout.temperature=0.8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as recipe.json holds it.")] = False,
) -> None:
    """Print the resolved recipe: every field with its value, defaults and overrides included."""
    from pathlib import Path

    import yaml

    from k31core.recipe.load import load_recipe, override_recipe, read_resolved, resolve

    frozen = Path(recipe) / "recipe.json"
    if frozen.is_file():
        resolved = resolve(override_recipe(read_resolved(frozen).recipe, set_ or []))
    else:
        resolved = resolve(load_recipe(recipe, set_ or []))
    if as_json:
        print(resolved.model_dump_json(indent=1))
        return
    print(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
