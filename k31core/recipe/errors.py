"""Errors of the recipe: a value the user wrote that cannot be used."""


class RecipeError(ValueError):
    """A recipe that cannot be run: names the field, the value seen and what to change."""
