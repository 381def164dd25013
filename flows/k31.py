"""The flow `k31`: prepare, cluster, the training loop, report. Plain Python, no torch.

    prepare ──► cluster ──► for step in …: rollout ─► train ─► sync ─► (save) ─► (evaluate) ─► finish_step ──► report

The run directory is the truth: a flow run that is killed, retried or started anew finds there where the run stands.
Deployments differ only by parameters.
"""

from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State, StateType
from prefect.logging import get_run_logger

from k31core.recipe.eval_request import EvalRequest
from k31core.recipe.load import resolve, start_lines
from tasks.artifacts import ProgressArtifact
from tasks.cluster import WorkerLostError, connect, connect_engine, release
from tasks.evaluate import evaluate, evaluate_adapter, open_saved_run
from tasks.finish_step import WatchdogStop, finish_step, restore_history
from tasks.prepare import prepare, prepare_evaluation, prepare_inputs
from tasks.report import report
from tasks.rollout import rollout
from tasks.run_directory import NothingToResumeError, Request, Run, begin_attempt, open_run
from tasks.save import save, save_if_idle
from tasks.sinks import open_sinks
from tasks.storage import STORAGE_NAME
from tasks.sync import sync
from tasks.train import train


@flow(name="k31", persist_result=True, result_serializer="json", result_storage=STORAGE_NAME)
def k31(  # noqa: PLR0913 - the parameters of the deployments
    recipe: str = "tiny",
    overrides: list[str] | None = None,
    save_dir: str = "runs",
    run_id: str | None = None,
    resume: bool = False,
    num_rollout: int | None = None,
    skip_saving: bool = False,
    stage: Literal["all", "prepare", "eval"] = "all",
    requested_by: str = "service",
    data: str | None = None,
    step: int | None = None,
    n_samples_per_eval_prompt: int | None = None,
    temperature: float | None = None,
) -> dict[str, Any] | State:
    """Train the recipe, or continue the run `run_id` (with `resume` and no id: the newest unfinished one).

    Stage `prepare` ends when checkpoint and data set are there. Stage `eval` evaluates a save of a run (the newest one,
    or that of `step`) on the recipe's held-out set, or on `data`: a file, a folder, or `owner/name` on the Hub; only it
    reads the last four parameters.
    """
    request = Request(recipe, tuple(overrides or ()), save_dir, run_id, resume, num_rollout, skip_saving, requested_by)
    if stage == "prepare":
        return prepare_inputs(request)
    if stage == "eval":
        return evaluate_save(
            request, EvalRequest(data, step, n_samples_per_eval_prompt, temperature, request.overrides)
        )
    try:
        run = open_run(request)
    except NothingToResumeError as nothing:
        return {"run": None, "why": str(nothing)}
    except ValueError as error:  # a wrong recipe, a locked or foreign directory: trying again cannot help
        return stopped(str(error))
    with run:
        for line in start_lines(resolve(run.recipe)):
            get_run_logger().info(line)
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


def evaluate_save(request: Request, wanted: EvalRequest) -> dict[str, Any] | State:
    """Serve a save with the engine alone and evaluate it; returns the metrics, the step and the table's path."""
    try:
        run = open_saved_run(request, wanted)
    except ValueError as error:
        return stopped(str(error))
    with run:
        prepare_evaluation(run)
        connect_engine(run)
        try:
            return evaluate_adapter(run, wanted.step)
        finally:
            release(run)


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
    again: WorkerLostError | None = lost
    while again is not None:
        get_run_logger().warning("after step %d: %s", run.position.trained, again)
        run.count_loss(again)
        try:
            connect(run)
            again = None
        except WorkerLostError as one_more:
            again = one_more


def stopped(reason: str) -> State:
    """A final state that no automation takes for a fault to be retried."""
    get_run_logger().error(reason)
    return State(type=StateType.CANCELLED, name="Stopped", message=reason)
