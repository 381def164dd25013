"""Stage rollout: draw, grade and commit the samples of one step."""

from typing import Any

from prefect import task

from k31core.checkpoint.commit import MANIFEST
from k31core.observe.ledger import Phase
from tasks.run_directory import Run
from tasks.storage import StepKey, describe_file


@task(
    name="rollout",
    task_run_name="rollout-{step:05d}",
    cache_policy=StepKey(fields=("step", "policy_version")),
    persist_result=True,
    result_serializer="json",
)
def rollout(run: Run, step: int, policy_version: int) -> dict[str, Any]:
    """Samples of `step` under adapter version `policy_version`, as a committed directory; returns its manifest.

    A committed rollout of the same step and version is reused, never drawn again; a damaged or stale one is set
    aside and drawn anew.
    """
    store = run.store
    reused = store.committed_rollout(step, policy_version) is not None
    with run.phase(Phase.ROLLOUT, step, {"policy_version": policy_version, "reused": reused}) as outputs:
        reply = run.call_engine("run", step, run.position.cursor, policy_version, str(store.sync_dir(policy_version)))
        store.prompts.record(step, reply["prompts"])
        directory = store.rollout_dir(step)
        outputs.update(directory=str(directory), metrics=reply["metrics"], cursor=reply["cursor"])
    return {
        "step": step,
        "directory": str(directory),
        "cursor": reply["cursor"],
        "metrics": reply["metrics"],
        "files": [describe_file(directory / MANIFEST)],
    }
