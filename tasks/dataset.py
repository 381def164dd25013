"""Stage prepare, data: raw rows from the Hub, a file or the arithmetic maker become prepared, memory-mapped prompts."""

import hashlib
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.recipe.data import DatasetRecipe
from k31core.recipe.model import TinyCheckpoint
from k31core.recipe.recipe import Recipe
from k31core.rollout.data import PreparedSplit
from k31core.rollout.dataset_file import DataError
from k31core.rollout.prepare_data import PrepareSettings, content_digest, prepare_split
from tasks.storage import describe_files

SPLITS = ("train", "heldout")
"""The data sets that a recipe can name."""


@task(
    name="prepare-dataset",
    task_run_name="prepare-dataset",
    # No result cache: the prepared directory is addressed by its content, and finding it again costs a hash of its
    # sources. A cached result could not see that a source file was edited.
    cache_policy=NO_CACHE,
    persist_result=False,
)
def prepare_dataset(
    recipe: dict[str, Any], model_dir: str, data_dir: str, splits: Sequence[str] = SPLITS
) -> dict[str, Any]:
    """The prepared data of a recipe (as JSON) as a directory with a folder for each of `splits` that the recipe has.

    Returns `{"directory", "splits": {name: manifest report}, "files": [{"path", "size", "sha256", "mtime_ns"}]}`.
    Raises DataError for data that cannot be used.
    """
    log = get_run_logger()
    tree = Recipe.model_validate(recipe)
    result = prepare_recipe_data(tree, Path(model_dir), Path(data_dir), log.info, splits=splits)
    for name, split in result["splits"].items():
        log.info("%s: %s", name, describe_split(split))
    return result


def prepare_recipe_data(
    recipe: Recipe, model_dir: Path, data_dir: Path, log: Callable[[str], Any], *, splits: Sequence[str] = SPLITS
) -> dict[str, Any]:
    """What the task does, for callers without Prefect; `log` is told how a download goes on."""
    known = {"train": recipe.data.train, "heldout": recipe.data.heldout}
    wanted = {name: dataset for name in splits if (dataset := known[name]) is not None}
    sources = {name: _source(dataset, recipe.model.tiny, data_dir, log) for name, dataset in wanted.items()}
    settings = {name: _settings(recipe, dataset) for name, dataset in wanted.items()}
    digests = [content_digest(sources[name], model_dir, settings[name]) for name in wanted]
    directory = data_dir / f"prepared-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"
    prepared = {}
    for name in wanted:
        made = prepare_split(
            sources[name],
            model_dir,
            directory,
            settings[name],
            name=name,
            trust_remote_code=recipe.model.trust_remote_code,
        )
        prepared[name] = PreparedSplit.open(made).manifest
    return {
        "directory": str(directory),
        "splits": {
            name: {"prompts": m["prompts"], "digest": m["digest"], **m["report"]} for name, m in prepared.items()
        },
        "files": describe_files(directory),
    }


def describe_split(split: dict[str, Any]) -> str:
    """One line about what happened to the rows of a split."""
    parts = [f"{split['prompts']} prompts of {split['rows']} rows"]
    if split["duplicates"]:
        parts.append(f"{split['duplicates']} duplicates by prompt")
    if split["conflicting_labels"]:
        parts.append(f"duplicates with another label: {'; '.join(split['conflicting_labels'])}")
    if split["too_long"]:
        parts.append(f"{split['too_long']} too long: {'; '.join(split['too_long_rows'])}")
    return ", ".join(parts)


def _settings(recipe: Recipe, dataset: DatasetRecipe) -> PrepareSettings:
    return PrepareSettings(
        split=dataset.split,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        duplicates=dataset.duplicates,
        too_long=dataset.too_long,
        thinking_effort=recipe.data.thinking_effort,
    )


def _source(dataset: DatasetRecipe, tiny: TinyCheckpoint | None, data_dir: Path, log: Callable[[str], Any]) -> Path:
    """The file or folder that the raw rows are in."""
    if dataset.source == "file":
        return data_dir / str(dataset.path)
    if dataset.source == "hub":
        from tasks.download import download_dataset_files

        return download_dataset_files(str(dataset.repo), dataset.revision, data_dir / dataset.name, log)
    if tiny is None:
        raise DataError(
            f"data set {dataset.name!r}: source 'arithmetic' takes its operands from model.tiny, and this recipe has "
            "none; use source 'file' or 'hub'"
        )
    return _arithmetic(tiny, data_dir) / f"{dataset.split}.jsonl"


def _arithmetic(tiny: TinyCheckpoint, data_dir: Path) -> Path:
    """The folder of the small arithmetic data set, made unless it is there."""
    from k31core.convert.tiny_data import DATASET_MANIFEST, make_arithmetic_dataset

    directory = data_dir / f"arithmetic-{tiny.max_operand}-{tiny.heldout_one_in}-{tiny.seed}"
    if not (directory / DATASET_MANIFEST).is_file():
        staging = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
        try:
            make_arithmetic_dataset(
                staging, max_operand=tiny.max_operand, heldout_one_in=tiny.heldout_one_in, seed=tiny.seed
            )
            shutil.rmtree(directory, ignore_errors=True)
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return directory
