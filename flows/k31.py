"""The flow `k31`: prepare, cluster, the training loop, report. Plain Python, no torch.

    prepare ──► cluster ──► for step in …: rollout ─► train ─► sync ─► (save) ─► (evaluate) ─► finish_step ──► report

The run directory is the truth: a flow run that is killed, retried or started anew finds there where the run stands.
Deployments differ only by parameters.
"""

from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State, StateType
from prefect.logging import get_run_logger

from tasks.artifacts import ProgressArtifact
from tasks.cluster import WorkerLostError, connect, release
from tasks.evaluate import evaluate
from tasks.finish_step import WatchdogStop, finish_step, restore_history
from tasks.prepare import prepare, prepare_inputs
from tasks.report import report
from tasks.rollout import rollout
from tasks.run_directory import NothingToResumeError, Request, Run, begin_attempt, open_run
from tasks.save import save, save_if_idle
from tasks.sinks import open_sinks
from tasks.storage import STORAGE_NAME
from tasks.sync import sync
from tasks.train import train


@flow(name="k31", persist_result=True, result_serializer="json", result_storage=STORAGE_NAME)
def k31(
    recipe: str = "tiny",
    overrides: list[str] | None = None,
    save_dir: str = "runs",
    run_id: str | None = None,
    resume: bool = False,
    num_rollout: int | None = None,
    skip_saving: bool = False,
    stage: Literal["all", "prepare", "eval"] = "all",
    requested_by: str = "service",
) -> dict[str, Any] | State:
    """Train the recipe, or continue the run `run_id` (with `resume` and no id: the newest unfinished one).

    Stage `prepare` ends when checkpoint and data set are there, `eval` evaluates the newest save of a run.
    """
    request = Request(recipe, tuple(overrides or ()), save_dir, run_id, resume, num_rollout, skip_saving, requested_by)
    if stage == "prepare":
        return prepare_inputs(request)
    try:
        run = open_run(request)
    except NothingToResumeError as nothing:
        return {"run": None, "why": str(nothing)}
    except ValueError as error:  # a wrong recipe, a locked or foreign directory: trying again cannot help
        return stopped(str(error))
    with run:
        if stage == "eval":
            return evaluate_save(run)
        refusal = begin_attempt(run)
        if refusal:
            return stopped(refusal)
        prepare(run)
        connect(run)
        run.save_if_idle = save_if_idle
        open_sinks(run)
        restore_history(run)
        try:
            train_loop(run)
        except WatchdogStop as stop:
            release(run)
            return stopped(str(stop))
        summary = report(run)
        release(run)
        return summary


def evaluate_save(run: Run) -> dict[str, Any]:
    """Serve what the trainer holds (the newest save, or more) and evaluate it; returns the metrics."""
    prepare(run)
    connect(run)
    step = run.position.trained
    sync(run, step)
    metrics = evaluate(run, step, policy_version=step, again=True)
    release(run)
    return {"step": step, **metrics}


def train_loop(run: Run) -> None:
    """From where the trainer's memory stands to the last step; a lost worker is replaced and its steps are redone."""
    progress = ProgressArtifact(run)
    while True:
        try:
            close_step(run, run.position.trained)
            progress.update(run.position.trained, run.last_step)
            if run.position.trained >= run.last_step:
                return
            one_update(run, run.position.trained + 1)
        except WorkerLostError as lost:
            recover(run, lost)


def one_update(run: Run, step: int) -> None:
    """Roll out with the current adapter and train on the result."""
    run.begin_step()
    drawn = rollout(run, step, policy_version=step - 1)
    train(run, step, drawn["directory"], run.position.incarnation)
    run.position.advance(step, drawn["cursor"])


def close_step(run: Run, step: int) -> None:
    """Publish the adapter after `step`, save and evaluate when it is time, record the step. Safe to repeat."""
    sync(run, step)
    if run.saves_at(step):
        save(run, step)
    if run.evaluates_at(step):
        evaluate(run, step, policy_version=step)
    if run.is_open(step):
        finish_step(run, step)


def recover(run: Run, lost: WorkerLostError) -> None:
    """Replace what was lost and go back to the last save; committed rollouts are used again. Gives up in the end."""
    get_run_logger().warning("after step %d: %s", run.position.trained, lost)
    run.count_loss(lost)
    connect(run)


def stopped(reason: str) -> State:
    """A final state that no automation takes for a fault to be retried."""
    get_run_logger().error(reason)
    return State(type=StateType.CANCELLED, name="Stopped", message=reason)
