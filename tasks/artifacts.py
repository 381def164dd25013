"""Prefect artifacts: an index of the run directory for the UI, never the truth."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact

from k31core.checkpoint.store import Commit
from k31core.observe import metrics as names
from tasks.run_directory import Run

TABLE_COLUMNS = (
    names.RAW_REWARD,
    names.RESPONSE_LEN_MEAN,
    names.TRUNCATED_RATIO,
    names.LOSS,
    names.GRAD_NORM,
    names.LOGPROB_ABS_DIFF,
    names.LOGPROB_KL,
    names.SC_TAIL_RATIO,
    names.CANARY_ABS_DIFF,
    names.STEP_TIME,
)
"""Columns of the metrics table; everything else is in `metrics.jsonl`."""
TABLE_ROWS = 50


def publish_adapter(run: Run, saved: Commit, reward: float | None) -> None:
    """A version of the run's adapter artifact: key, step, path, digests, reward, resume command."""
    if not run.recipe.observe.prefect_artifacts:
        return
    facts = saved.facts
    rows = {
        "key": f"k31-adapter-{run.artifact_key}",
        "run": run.store.run_id,
        "step": saved.step,
        "path": str(saved.directory),
        "directory digest": saved.manifest["digest"],
        "adapter digest": facts["adapter_digest"],
        "base model": facts["base_model"],
        "recipe digest": facts["recipe_digest"],
        "optimizer saved": facts["optimizer"],
        "reward": None if reward is None else round(reward, 4),
        "bytes": sum(entry["size"] for entry in saved.manifest["files"]),
        "resume": run.resume_command,
    }
    create_table_artifact(
        key=f"k31-adapter-{run.artifact_key}",
        table=[{"field": field, "value": value} for field, value in rows.items()],
        description=f"**Adapter of step {saved.step}**, reward {rows['reward']}. Resume: `{run.resume_command}`",
    )


def publish_metrics(run: Run, history: Sequence[Mapping[str, Any]]) -> None:
    """A version of the run's metrics table: the last steps, the most telling columns."""
    if not run.recipe.observe.prefect_artifacts:
        return
    table = [{"step": row["step"], **{name: _cell(row.get(name)) for name in TABLE_COLUMNS}} for row in history]
    last = history[-1]
    create_table_artifact(
        key=f"k31-metrics-{run.artifact_key}",
        table=table[-TABLE_ROWS:],
        description=f"Step {last['step']} of {run.last_step}, reward {_cell(last.get(names.RAW_REWARD))}",
    )


class ProgressArtifact:
    """The flow run's progress bar in the UI."""

    def __init__(self, run: Run) -> None:
        self._id: Any = None
        if run.recipe.observe.prefect_artifacts:
            self._id = create_progress_artifact(
                progress=100.0 * run.position.trained / run.last_step,
                key=f"k31-progress-{run.artifact_key}",
                description=f"steps of {run.store.run_id}",
            )

    def update(self, step: int, last_step: int) -> None:
        """Move the bar."""
        if self._id is not None:
            update_progress_artifact(self._id, progress=100.0 * step / last_step)


def _cell(value: Any) -> Any:
    """Tables are JSON: a NaN becomes its name."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value
