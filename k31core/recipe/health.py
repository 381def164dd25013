"""What a validated run of a recipe looked like: shown beside a new run, never a reason to stop."""

from typing import Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section


class HealthRecipe(Section):
    """Values seen in the validated run, by metric name (times in seconds). Empty where nothing was published."""

    validated: bool = False
    """Whether these very settings ran; false where only a neighbouring version did."""
    bands: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Range over the run: (lowest, highest)."""
    typical: dict[str, float] = Field(default_factory=dict)
    """About this much at every step."""
    peaks: dict[str, float] = Field(default_factory=dict)
    """Largest value seen: memory a card (GiB) and a host (GB)."""
    trends: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """From the first five steps to the last five: (first, last)."""
    note: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, (low, high) in self.bands.items():
            if low > high:
                raise ValueError(f"health.bands.{name} is ({low}, {high}): the lower end comes first")
        return self
