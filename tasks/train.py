"""Stage train: one optimizer step over a committed rollout."""

from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from k31core.observe.ledger import Phase
from tasks.run_directory import Run
from tasks.storage import StepKey


@task(
    name="train",
    task_run_name="train-{step:05d}",
    cache_policy=StepKey(fields=("step", "incarnation")),
    persist_result=True,
    result_serializer="json",
)
def train(run: Run, step: int, rollout_dir: str, incarnation: str) -> dict[str, Any]:
    """Train every rank on the rollout; returns metrics and the digest of the adapter after the step.

    `incarnation` names the trainer's memory: a restored trainer must train again. A step that was trained before must
    give the same adapter on a CPU; where it does not, the log says so.
    """
    if run.recipe.cluster.colocate:
        run.call_engine("sleep")
        run.call_trainers("onload")
    before = run.store.ledger.last(Phase.TRAIN, step)
    with run.phase(Phase.TRAIN, step, {"rollout": rollout_dir, "incarnation": incarnation}) as outputs:
        reply = run.call_trainers("train", step, rollout_dir)[0]
        outputs.update(metrics=reply["metrics"], adapter_digest=reply["adapter_digest"])
    if before and before["outputs"]["adapter_digest"] != reply["adapter_digest"]:
        get_run_logger().warning(
            "step %d was trained again and gave adapter %s, before the resume it was %s: expected where the "
            "hardware is not deterministic or save.optimizer is off, otherwise a fault",
            step, reply["adapter_digest"][:12], before["outputs"]["adapter_digest"][:12],
        )  # fmt: skip
    return {"step": step, "metrics": reply["metrics"], "adapter_digest": reply["adapter_digest"]}
