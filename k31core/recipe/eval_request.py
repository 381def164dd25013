"""`k31 eval`: what is asked for, and the recipe that an engine is started with to answer it.

The run's own recipe is never changed: an evaluation on other data, with other sampling, is described by a recipe of its
own, made from the run's.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import differing_fields, override_recipe
from k31core.recipe.recipe import Recipe

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
_FIXED = ("model.", "train.lora.")
"""What a save belongs to: with another value, it would not be the run's adapter that is evaluated."""


class EvalDataError(ValueError):
    """Data that an evaluation cannot use: names it and what it may be."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What the user typed. None leaves a value to the run's recipe."""

    data: str | None = None
    """A file or folder (jsonl, parquet, written by `datasets`), or `owner/name` of a data set on the Hub."""
    step: int | None = None
    """The save to evaluate; None is the newest, 0 the model before the first step."""
    samples: int | None = None
    """Answers to each prompt."""
    temperature: float | None = None
    overrides: tuple[str, ...] = ()
    """`section.field=value` on top of everything else."""

    def recipe(self, recipe: Recipe, data_dir: Path) -> Recipe:
        """The recipe of the evaluation, from the run's; its `data.heldout` is what is evaluated.

        Greedy answers are all equal, so temperature 0 means one of each unless a number is given. `eval.max_prompts` is
        for the recipe's own set and does not cut another one. Raises RecipeError or EvalDataError.
        """
        changes: list[str] = []
        if self.data is not None:
            found = find_data(self.data, data_dir)
            changes += [f"data.heldout={json.dumps(found)}", f"eval.name={found['name']}", "eval.max_prompts=null"]
        if self.temperature is not None:
            changes.append(f"eval.temperature={self.temperature!r}")
        samples = 1 if self.samples is None and self.temperature == 0.0 else self.samples
        if samples is not None:
            changes.append(f"eval.samples_per_prompt={samples}")
        wanted = override_recipe(recipe, [*changes, *self.overrides])
        for field, (was, now) in differing_fields(recipe, wanted).items():
            if field.startswith(_FIXED):
                raise RecipeError(
                    f"{field}: {was!r} -> {now!r}: an evaluation cannot change what the run's saves belong to"
                )
        if wanted.data.heldout is None:
            raise RecipeError(
                f"recipe {recipe.name!r} has no held-out data set (data.heldout): name what to evaluate on with "
                "`--data FILE` (parameter `data` of the deployment)"
            )
        return wanted


def find_data(text: str, data_dir: Path) -> dict[str, Any]:
    """The fields of a recipe's data set for a path (also under `data_dir`) or a name on the Hub.

    Raises EvalDataError for what is neither.
    """
    places = [Path(text).expanduser().absolute(), data_dir.absolute() / text]
    path = next((place for place in places if place.exists()), None)
    if path is not None:
        return {"name": metric_name(path.stem if path.is_file() else path.name), "source": "file", "path": str(path)}
    if _HUB_NAME.fullmatch(text) and not text.lower().endswith(_FILE_ENDINGS):
        return {"name": metric_name(text.partition("/")[2]), "source": "hub", "repo": text}
    raise EvalDataError(
        f"data {text!r} is neither a file or folder ({', '.join(map(str, places))}) nor a data set on the Hub "
        "(`owner/name`)"
    )


def metric_name(text: str) -> str:
    """`text` as it stands in `eval/<name>`: `AIME_2024.test` becomes `aime-2024-test`."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return name or "data"
