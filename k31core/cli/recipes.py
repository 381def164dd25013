"""`k31 recipes`: the shipped recipes."""


def recipes() -> None:
    """List the shipped recipes."""
    from rich.console import Console
    from rich.table import Table

    from k31core.recipe.load import load_recipe, recipe_names

    table = Table("recipe", "model", "trainer", "batch", "what it is", title="recipes", title_justify="left")
    for name in recipe_names():
        recipe = load_recipe(name)
        layout = recipe.train.parallel
        table.add_row(
            name,
            recipe.model.name,
            f"TP{layout.tp} PP{layout.pp} CP{layout.cp} EP{layout.ep} DP{layout.dp}",
            f"{recipe.rollout.prompts_per_step} x {recipe.rollout.samples_per_prompt}",
            recipe.description,
        )
    Console().print(table)
