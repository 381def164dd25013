"""Stage report: pictures and summary of the run directory, and its end in the ledger."""

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from k31core.observe import metrics as names
from k31core.observe.ledger import Phase
from k31core.report.report import write_report
from tasks.run_directory import Run


@task(name="report", task_run_name="report", cache_policy=NO_CACHE, persist_result=False)
def report(run: Run) -> dict[str, Any]:
    """Draw the report and return the run's summary; the ledger's `report` line marks the run as finished."""
    with run.phase(Phase.REPORT, run.last_step) as outputs:
        outputs.update(write_report(run.store.root))
    summary = {
        "run": run.store.run_id,
        "directory": str(run.store.root),
        "steps": run.position.trained,
        "saved": run.position.saved,
        "reward": first_and_last(run, names.RAW_REWARD),
        "report": outputs,
    }
    if run.recipe.observe.prefect_artifacts:
        create_markdown_artifact(
            key=f"k31-report-{run.artifact_key}", markdown=_markdown(summary), description=f"run {run.store.run_id}"
        )
    return summary


def first_and_last(run: Run, metric: str, window: int = 5) -> list[float] | None:
    """Means over the first and the last `window` steps; None before the first step."""
    values = [row[metric] for row in run.store.metrics.history if metric in row]
    if not values:
        return None
    first, last = values[:window], values[-window:]
    return [sum(first) / len(first), sum(last) / len(last)]


def _markdown(summary: dict[str, Any]) -> str:
    lines = [f"# Run {summary['run']}", ""]
    if summary["reward"]:
        lines.append(f"Reward: {summary['reward'][0]:.3f} (first steps) to {summary['reward'][1]:.3f} (last steps).")
    lines += [f"- {name}: `{summary[name]}`" for name in ("directory", "steps", "saved")]
    lines += [f"- {name}: `{path}`" for name, path in summary["report"].items()]
    return "\n".join(lines)
