"""Plain statements about a run: what rose, what stayed in its band, and how sure one can be.

Reported, never a reason to stop: stopping is the watchdogs' part.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from k31core.report.read import RunRecord, Series


class Mark(StrEnum):
    """How a statement reads at a glance."""

    GOOD = "good"
    WATCH = "watch"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of the report's summary."""

    what: str
    value: str
    mark: Mark
    note: str = ""


_AGREEMENT = "train/train_rollout_logprob_abs_diff"


def statements(run: RunRecord) -> list[Statement]:
    """The summary of a run, most important first."""
    lines = [_rise(run.series("rollout/raw_reward"), "sampled reward"), *_evals(run), *_agreement(run)]
    rho = run.series("train/sc_tail_ratio")
    if rho:
        mark = Mark.GOOD if max(rho.values) < 3 else Mark.WATCH
        lines.append(Statement("score-centering tail ratio, largest", f"{max(rho.values):.3f}", mark, "warn above 3"))
    truncated = run.series("rollout/truncated_ratio")
    if truncated:
        lines.append(_change(truncated, "truncated answers"))
    step_time = run.series("perf/step_time")
    if step_time:
        lines.append(Statement("step time, mean", f"{step_time.mean_of():.2f} s", Mark.PLAIN))
    lines.extend(_bands(run))
    return lines


def _rise(series: Series, label: str) -> Statement:
    if not series:
        return Statement(label, "not recorded", Mark.WATCH)
    first, last = series.mean_of(first=5), series.mean_of(last=5)
    mark = Mark.GOOD if last > first else Mark.WATCH
    return Statement(f"{label}, first five → last five steps", f"{first:.3f} → {last:.3f} ({last - first:+.3f})", mark)


def _change(series: Series, label: str) -> Statement:
    first, last = series.mean_of(first=5), series.mean_of(last=5)
    return Statement(f"{label}, first five → last five steps", f"{first:.1%} → {last:.1%}", Mark.PLAIN)


def _evals(run: RunRecord) -> list[Statement]:
    lines = []
    name = f"eval/{run.resolved.recipe.eval.name}"
    series = run.series(name)
    if series:
        count = run.series(f"{name}/problems")
        first, last = series.values[0], series.values[-1]
        note = ""
        if count:
            before, after = _standard_error(first, count.values[0]), _standard_error(last, count.values[-1])
            note = f"standard error of one evaluation ±{after:.3f}"
            if len(series.values) > 1:
                note += f", of the rise ±{math.hypot(before, after):.3f}"
            note += f" ({count.values[-1]:.0f} problems, independent answers assumed)"
        value = f"{first:.3f} → {last:.3f} ({last - first:+.3f})" if len(series.values) > 1 else f"{first:.3f}"
        lines.append(Statement(f"{name}, first → last", value, Mark.GOOD if last > first else Mark.PLAIN, note))
    return lines


def _standard_error(share: float, problems: float) -> float:
    return math.sqrt(max(share * (1 - share), 0.0) / max(problems, 1.0))


def _agreement(run: RunRecord) -> list[Statement]:
    series = run.series(_AGREEMENT)
    if not series:
        return [Statement(_AGREEMENT, "not recorded", Mark.WATCH)]
    limit = run.resolved.recipe.watchdog.logprob_abs_diff_warn
    largest = max(series.values)
    mark = Mark.GOOD if limit is None or largest < limit else Mark.WATCH
    note = "" if limit is None else f"warn above {limit:g}; growth matters more than level"
    return [Statement("train/rollout log-prob difference, largest", f"{largest:.2e}", mark, note)]


def _bands(run: RunRecord) -> list[Statement]:
    """The run beside what the recipe's validated run looked like."""
    health = run.resolved.recipe.health
    lines = []
    for name, (low, high) in health.bands.items():
        series = run.series(name)
        if series:
            mean = series.mean_of()
            mark = Mark.GOOD if low <= mean <= high else Mark.WATCH
            lines.append(Statement(f"{name}, mean", f"{mean:.4g}", mark, f"published band {low:g} to {high:g}"))
    for name, (first, last) in health.trends.items():
        series = run.series(name)
        if series:
            value = f"{series.mean_of(first=5):.4g} → {series.mean_of(last=5):.4g}"
            note = f"published {first:g} → {last:g}"
            lines.append(Statement(f"{name}, first five → last five", value, Mark.PLAIN, note))
    return lines
