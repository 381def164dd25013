"""Prefect artifacts: an index of the run directory for the UI, never the truth."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
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
EVAL_ROWS = 200
"""Problems in the table of an evaluation: an artifact is a row of the server's database, not a place for megabytes."""
_LABEL_CHARS, _ID_CHARS = 60, 16


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


def publish_evaluation(run: Run, path: Path) -> None:
    """A version of the table of an evaluation, one row a problem; `path` is the whole of it in the run directory."""
    if not run.recipe.observe.prefect_artifacts:
        return
    content = json.loads(path.read_bytes())
    name, problems = run.recipe.eval.name, content["problems"]
    numbers = {key: _cell(value) for key, value in content["metrics"].items()}
    head = ", ".join(f"{key} {value}" for key, value in numbers.items() if key.startswith(f"eval/{name}"))
    shown = f"the first {EVAL_ROWS} of {len(problems)} problems" if len(problems) > EVAL_ROWS else "every problem"
    create_table_artifact(
        key=f"k31-eval-{run.artifact_key}-{artifact_name(name)}",
        table=[problem_row(problem) for problem in problems[:EVAL_ROWS]],
        description=f"**Step {content['step']} on {name}**: {head}. Below: {shown}; all with answers in `{path}`",
    )


def problem_row(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A problem of an evaluation's table file as a row for the UI; `reason` counts the verdicts of its answers."""
    label = str(problem["label"])
    reasons = Counter(problem["reasons"]).most_common()
    alone = len(reasons) == 1
    return {
        "row": problem["row"],
        "problem": problem["prompt_id"][:_ID_CHARS],
        "label": label if len(label) <= _LABEL_CHARS else label[: _LABEL_CHARS - 1] + "…",
        "correct": f"{problem['right']}/{problem['samples']}",
        "truncated": problem["truncated"],
        "mean length": round(problem["response_len_mean"], 1),
        "reason": reasons[0][0] if alone else ", ".join(f"{reason} {count}" for reason, count in reasons),
    }


def artifact_name(text: str) -> str:
    """`text` as Prefect allows it in artifact keys."""
    return "".join(c if c.isascii() and (c.islower() or c.isdigit()) else "-" for c in text.lower())


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
