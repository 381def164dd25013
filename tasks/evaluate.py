"""Stage eval: the held-out set; reported, never a reason to stop."""

from typing import Any

from prefect import task

from k31core.observe.ledger import Phase
from tasks.run_directory import Run
from tasks.storage import StepKey


@task(
    name="evaluate",
    task_run_name="evaluate-{step:05d}",
    cache_policy=StepKey(fields=("step", "policy_version")),
    persist_result=True,
    result_serializer="json",
)
def evaluate(run: Run, step: int, policy_version: int, again: bool = False) -> dict[str, Any]:
    """Answer and grade the held-out set with version `policy_version`; returns its metrics.

    A step that was evaluated before a resume is not evaluated again, unless the caller asks for it.
    """
    before = run.store.ledger.last(Phase.EVAL, step)
    if before is not None and not again:
        return dict(before["outputs"]["metrics"])
    with run.phase(Phase.EVAL, step, {"policy_version": policy_version}) as outputs:
        outputs["metrics"] = run.call_engine("evaluate", step, policy_version)
    return dict(outputs["metrics"])
