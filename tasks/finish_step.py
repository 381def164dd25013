"""End of a step: one object in `metrics.jsonl`, the sinks, the UI, and the watchdog's verdict."""

import json
import time
from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.observe import metrics as names
from k31core.observe import watchdog
from k31core.observe.jsonl import write_atomic
from k31core.observe.ledger import Phase
from tasks.artifacts import publish_metrics
from tasks.run_directory import Run

PHASE_TIMES = {
    Phase.ROLLOUT: names.ROLLOUT_TIME,
    Phase.TRAIN: names.TRAIN_TIME,
    Phase.SYNC: names.SYNC_TIME,
    Phase.SAVE: names.SAVE_TIME,
    Phase.EVAL: "perf/eval_time",
}


class WatchdogStop(RuntimeError):
    """The numbers went outside the recipe's limits; the evidence is saved and the message says how to continue."""


@task(name="finish-step", task_run_name="finish-step-{step:05d}", cache_policy=NO_CACHE, persist_result=False)
def finish_step(run: Run, step: int) -> None:
    """Record the step everywhere. Raises WatchdogStop after everything is recorded."""
    values = step_metrics(run, step)
    if run.step_began is not None:
        values[names.STEP_TIME] = time.monotonic() - run.step_began
        lines = [run.store.ledger.last(phase, step) for phase in PHASE_TIMES]
        phases = sum(line["seconds"] for line in lines if line)
        values[names.ORCHESTRATION_TIME] = values[names.STEP_TIME] - phases
        run.step_began = None
    run.store.metrics.record(step, values)
    for sink in run.sinks:
        sink.log(step, values)
    publish_metrics(run, run.store.metrics.history)
    _watch(run, step)


def step_metrics(run: Run, step: int) -> dict[str, Any]:
    """The metrics of a step from its ledger lines: the newest line of each phase counts."""
    records = {phase: run.store.ledger.last(phase, step) for phase in PHASE_TIMES}
    found = [record["outputs"].get("metrics", {}) for record in records.values() if record]
    values = names.merge(found)
    for phase, record in records.items():
        if record:
            values.setdefault(PHASE_TIMES[phase], record["seconds"])
    return values


def restore_history(run: Run) -> None:
    """Fill in metrics of earlier steps that are in the ledger but were not written before a kill.

    The step that the trainer holds is left to `close_step`: its sync may not have happened yet.
    """
    present = {row["step"] for row in run.store.metrics.history}
    for step in range(1, run.position.trained):
        if step not in present and run.store.ledger.last(Phase.TRAIN, step):
            run.store.metrics.record(step, step_metrics(run, step))


def _watch(run: Run, step: int) -> None:
    findings = watchdog.evaluate(run.store.metrics.history, run.recipe.watchdog)
    log = get_run_logger()
    for finding in findings:
        log.warning("watchdog %s (watchdog.%s): %s", finding.level, finding.rule, finding.message)
    ending = watchdog.stops(findings)
    if not ending:
        return
    evidence: dict[str, Any] = {
        "step": step,
        "findings": [_plain(finding) for finding in findings],
        "history": run.store.metrics.history[-2 * watchdog.SLOPE_STEPS :],
    }
    path = run.store.root / f"watchdog-{step:05d}.json"
    write_atomic(path, json.dumps(evidence, indent=1).encode())
    run.store.ledger.append(Phase.WATCHDOG, step, outputs={"findings": evidence["findings"], "evidence": str(path)})
    reasons = "; ".join(f"{finding.message} (watchdog.{finding.rule})" for finding in ending)
    raise WatchdogStop(
        f"stopped by the watchdog after step {step}: {reasons}. Evidence: {path}. The rollout of this step is kept. "
        f"To continue from the last save all the same: {run.resume_command} --set watchdog.{ending[0].rule}=null"
    )


def _plain(finding: watchdog.Finding) -> Mapping[str, Any]:
    return {
        "level": finding.level.value,
        "rule": finding.rule,
        "metric": finding.metric,
        "value": finding.value,
        "message": finding.message,
    }
