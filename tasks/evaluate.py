"""Stage eval: the held-out set in the loop, or any data set when a user asks; reported, never a reason to stop."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.checkpoint.store import Commit, RunStore, StoreError, committed_steps, newest_saved, run_ids
from k31core.cluster.home import find_home
from k31core.observe.ledger import Phase
from k31core.recipe.eval_request import EvalRequest
from k31core.recipe.load import read_resolved
from k31core.rollout.evaluation import table_file
from k31core.sync.publisher import SyncError
from tasks.artifacts import publish_evaluation
from tasks.run_directory import Request, Run
from tasks.storage import StepKey

BASE_VERSION = -1
"""What an engine serves before its first adapter: the base alone."""


@task(
    name="evaluate",
    task_run_name="evaluate-{step:05d}",
    cache_policy=StepKey(fields=("step", "policy_version")),
    persist_result=True,
    result_serializer="json",
)
def evaluate(run: Run, step: int, policy_version: int) -> dict[str, Any]:
    """Answer and grade the held-out set with version `policy_version`; returns its metrics.

    A step that was evaluated before a resume is not evaluated again.
    """
    before = run.store.ledger.last(Phase.EVAL, step)
    if before is not None:
        return dict(before["outputs"]["metrics"])
    with run.phase(Phase.EVAL, step, {"policy_version": policy_version}) as outputs:
        outputs["metrics"] = run.call_engine("evaluate", step, policy_version)
    publish_evaluation(run, table_file(run.store.root, run.recipe.eval, step, asked=False))
    return dict(outputs["metrics"])


def open_saved_run(request: Request, wanted: EvalRequest) -> Run:
    """The run `request.run_id` (else the newest one with a save) for an evaluation, with the recipe of that.

    What is recorded of the run itself stays as it is. Raises RecipeError, EvalDataError, StoreError, LockedError.
    """
    home, save_dir = find_home(), Path(request.save_dir).absolute()
    root = save_dir / (request.run_id or newest_saved(save_dir))
    if not (root / "recipe.json").is_file():
        raise StoreError(f"{root} is not a run directory; runs in {save_dir}: {', '.join(run_ids(save_dir)) or 'none'}")
    recipe = wanted.recipe(read_resolved(root / "recipe.json").recipe, home.data)
    run = Run(RunStore(root), home, request)
    run.recipe, run.evaluates_only = recipe, True
    return run


@task(name="evaluate-save", task_run_name="evaluate-save", cache_policy=NO_CACHE, persist_result=False)
def evaluate_adapter(run: Run, step: int | None) -> dict[str, Any]:
    """Serve the save of `step` (None: the newest; 0: the model before the first step) and evaluate it.

    Returns `{"run", "step", "table", metrics...}`. Raises StoreError when there is no such save.
    """
    saved = find_save(run.store, step)
    number = saved.step if saved else 0
    version = _serve(run, saved)
    with run.phase(Phase.EVAL_ASKED, number, {"policy_version": version, "data": run.recipe.eval.name}) as outputs:
        outputs["metrics"] = run.call_engine("evaluate", number, version)
        path = table_file(run.store.root, run.recipe.eval, number, asked=True)
        outputs["table"] = str(path)
    publish_evaluation(run, path)
    return {"run": run.store.run_id, "step": number, "table": str(path), **outputs["metrics"]}


def find_save(store: RunStore, step: int | None) -> Commit | None:
    """The valid save of `step`, the newest for None; None for the model before the first step.

    Raises StoreError for a step that was not saved, is not kept any more, or is damaged.
    """
    if step == 0:
        return None
    search = store.latest_valid_commit(at_most=step)
    if step is None or (search.commit is not None and search.commit.step == step):
        for directory, why in search.rejected:
            get_run_logger().warning("save %s is not valid and is passed over: %s", directory.name, why)
        return search.commit
    damaged = "; ".join(why for _, why in search.rejected)
    saved = ", ".join(map(str, committed_steps(store.root / "adapters"))) or "none"
    raise StoreError(
        f"run {store.run_id} has no valid save of step {step}{f' ({damaged})' if damaged else ''}; saved steps: "
        f"{saved} (0 is the model before the first step; save.keep_every keeps more)"
    )


def _serve(run: Run, saved: Commit | None) -> int:
    """Give the engine its adapter; returns the version that it serves. Raises SyncError for another digest."""
    warm = run.recipe.train.lora.warm_start
    if saved is None and warm is None:
        return BASE_VERSION
    directory, version = (saved.directory, saved.step) if saved else (Path(str(warm)), 0)
    digest = run.call_engine("load_adapter", str(directory), version)["digest"]
    if saved is not None and digest != saved.facts["adapter_digest"]:
        raise SyncError(
            f"the engine confirmed adapter {digest[:16]}, the save of step {saved.step} holds "
            f"{saved.facts['adapter_digest'][:16]} ({directory})"
        )
    return version
