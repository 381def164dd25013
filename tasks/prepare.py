"""Stage prepare: the base checkpoint and the data set, cached by content over all runs on this machine."""

import concurrent.futures
import hashlib
import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from k31core.checkpoint.commit import sha256_file
from k31core.checkpoint.verify_files import structure_problems
from k31core.cluster.home import Home, find_home
from k31core.observe.ledger import Phase
from k31core.recipe.load import load_recipe
from k31core.recipe.model import ModelSource, TinyCheckpoint
from k31core.recipe.recipe import Recipe
from tasks.convert import convert_for_training
from tasks.run_directory import Prepared, Request, Run, request_overrides
from tasks.storage import ContentKey, describe_files

TINY_VERSION = 1
"""Raise when the tiny checkpoint's maker changes what it makes."""


def prepare(run: Run) -> Prepared:
    """Make or find everything the run reads, and remember it in the ledger."""
    with run.phase(Phase.PREPARE, run.position.trained) as outputs:
        run.prepared = _prepare(run.recipe, run.home)
        outputs.update(model_dir=str(run.prepared.model_dir), data_dir=str(run.prepared.data_dir))
    return run.prepared


def prepare_evaluation(run: Run) -> Prepared:
    """What an engine alone needs: the checkpoint and the held-out set, no training prompts."""
    model_dir = _prepare_model(run.recipe, run.home)
    run.prepared = Prepared(model_dir, _prepare_data(run.recipe, model_dir, run.home, splits=["heldout"]))
    return run.prepared


def prepare_inputs(request: Request) -> dict[str, Any]:
    """Preparation alone, without a run directory."""
    prepared = _prepare(load_recipe(request.recipe, request_overrides(request)), find_home())
    return {"model_dir": str(prepared.model_dir), "data_dir": str(prepared.data_dir)}


def _prepare(recipe: Recipe, home: Home) -> Prepared:
    model_dir = _prepare_model(recipe, home)
    if recipe.model.ref_load == "torch_dist":
        convert_for_training(model_dir)
    return Prepared(model_dir, _prepare_data(recipe, model_dir, home, splits=["train", "heldout"]))


def _prepare_data(recipe: Recipe, model_dir: Path, home: Home, *, splits: list[str]) -> Path:
    from tasks.dataset import prepare_dataset

    data = prepare_dataset(recipe.model_dump(mode="json"), str(model_dir), str(home.data), splits)
    return Path(data["directory"])


def _prepare_model(recipe: Recipe, home: Home) -> Path:
    if recipe.model.source is ModelSource.TINY and recipe.model.tiny is not None:
        config = recipe.model.tiny.model_dump(mode="json")
        return Path(make_tiny(config, recipe.model.family, str(home.models))["directory"])
    if recipe.model.source is ModelSource.HUB:
        from tasks.download import download_model

        return Path(download_model(recipe.model.model_dump(mode="json"), str(home.models))["directory"])
    if recipe.model.source is ModelSource.RANDOM:
        raise ModelMissingError(
            "model.source 'random' is for measuring speed (python -m tests.gpu.run_1xh200): a run cannot learn from it"
        )
    return _local_model(recipe, home.models)


def _local_model(recipe: Recipe, models: Path) -> Path:
    directory = models / recipe.model.name
    if not (directory / "config.json").is_file():
        raise ModelMissingError(
            f"model.source is 'local' but {directory} holds no config.json: put the checkpoint there, set "
            f"K31_MODEL_DIR to where it is, or use model.source=hub"
        )
    problems = structure_problems(directory)
    if problems:
        raise ModelMissingError(
            f"the checkpoint in {directory} is not whole: "
            + "; ".join(f"{problem.path}: {problem.detail}" for problem in problems[:3])
        )
    return directory


class ModelMissingError(ValueError):
    """A local checkpoint that is not there or not whole: names the directory and the file."""


@task(
    name="make-tiny-checkpoint",
    task_run_name="make-tiny-checkpoint",
    cache_policy=ContentKey(fields=("config", "family", "models"), version=TINY_VERSION),
    persist_result=True,
    result_serializer="json",
)
def make_tiny(config: dict[str, Any], family: str, models: str) -> dict[str, Any]:
    """Pre-train and write the tiny checkpoint, in a process of its own so that its memory goes away."""
    name = hashlib.sha256(json.dumps([TINY_VERSION, family, config], sort_keys=True).encode()).hexdigest()[:12]
    directory = Path(models) / f"tiny-{name}"
    if _made_before(directory):
        return {"directory": str(directory), "files": describe_files(directory)}
    staging = directory.with_name(f".{directory.name}.making")
    for stale in (staging, directory):
        if stale.exists():
            shutil.rmtree(stale)
    staging.mkdir(parents=True)
    get_run_logger().info("pre-training the tiny checkpoint: about two minutes, once")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_make_tiny, config, family, str(staging)).result()
    staging.rename(directory)
    return {"directory": str(directory), "files": describe_files(directory)}


def _made_before(directory: Path) -> bool:
    """Whether the directory (named by its content) is there and every file is as its maker's manifest says."""
    path = directory / "tiny.json"
    if not path.is_file():
        return False
    files = json.loads(path.read_bytes())["files"]
    return all(
        (directory / entry["path"]).is_file() and sha256_file(directory / entry["path"]) == entry["sha256"]
        for entry in files
    )


def _make_tiny(config: dict[str, Any], family: str, out_dir: str) -> None:
    """Runs in the child process: torch is imported here only."""
    from k31core.convert.tiny import make_tiny_checkpoint

    def progress(done: int, total: int, note: str) -> None:
        tenth = max(1, total // 10)
        if done == total or done // tenth > said[0]:
            said[0] = done // tenth
            print(f"  pre-training step {done} of {total}: {note}", flush=True)

    said = [0]
    make_tiny_checkpoint(TinyCheckpoint.model_validate(config), family, Path(out_dir), progress)
