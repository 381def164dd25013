"""Stage save: the adapter (and the optimizer) as a commit in the run directory, and its artifact."""

import hashlib
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from k31core.checkpoint.store import Commit
from k31core.cluster.actors import WorkerLostError
from k31core.observe.ledger import Phase
from k31core.observe.metrics import RAW_REWARD
from tasks.artifacts import publish_adapter
from tasks.run_directory import Run


@task(name="save", task_run_name="save-{step:05d}", cache_policy=NO_CACHE, persist_result=False)
def save(run: Run, step: int) -> dict[str, Any]:
    """Commit the adapter after `step`, publish its artifact, and delete what retention no longer keeps.

    A full disk, a lost worker or a value that is not finite loses nothing: the previous save stays as it is.
    """
    with run.phase(Phase.SAVE, step) as outputs:
        saved = commit_adapter(run, step)
        outputs.update(directory=str(saved.directory), digest=saved.manifest["digest"])
    reward = _reward(run, step)
    publish_adapter(run, saved, reward)
    removed = run.store.apply_retention()
    return {"step": step, "directory": str(saved.directory), "removed": [path.name for path in removed]}


def commit_adapter(run: Run, step: int) -> Commit:
    """Export from every rank into one staging directory and commit it as the save of `step`."""
    optimizer = run.recipe.save.optimizer
    with run.store.save_staging(step) as staging:
        reply = run.call_trainers("export", step, str(staging), optimizer)[0]
        facts = {
            "policy_version": step,
            "cursor": run.position.cursor,
            "adapter_digest": reply["adapter_digest"],
            "optimizer": optimizer,
            "recipe_digest": hashlib.sha256(run.recipe.model_dump_json().encode()).hexdigest(),
            "base_model": str(run.recipe.model.name),
        }
        saved = run.store.save_adapter(staging, step, facts)
    run.position.saved = step
    return saved


def save_if_idle(run: Run) -> int | None:
    """On an interruption: save the step in the trainer's memory when the trainer stands between two steps.

    Returns the step, None when there was nothing new to save or the trainer was in the middle of one.
    """
    step = run.position.trained
    if run.recipe.save.skip_saving or not run.trainers or step <= run.position.saved:
        return None
    try:
        if any(worker.call("step", timeout_s=10.0) != step for worker in run.trainers):
            return None
        with run.phase(Phase.SAVE, step, {"interrupted": True}) as outputs:
            saved = commit_adapter(run, step)
            outputs.update(directory=str(saved.directory), digest=saved.manifest["digest"])
    except WorkerLostError:
        return None
    return step


def _reward(run: Run, step: int) -> float | None:
    record = run.store.ledger.last(Phase.ROLLOUT, step)
    return record["outputs"]["metrics"].get(RAW_REWARD) if record else None
