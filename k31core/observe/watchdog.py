"""Limits on a run's numbers: a pure function from the metrics' history to findings. Warn first, then stop.

Rewards and evaluations are never a reason to stop; an isolated spike of the gradient norm only warns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from k31core.observe import metrics as names

SLOPE_STEPS = 10
"""Steps over which a rise is measured."""


class Level(StrEnum):
    """What to do about a finding."""

    WARN = "warn"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Finding:
    """One number outside its limit."""

    level: Level
    rule: str
    """Name of the recipe field under `watchdog.`; setting it to null (or false) switches the rule off."""
    metric: str
    value: float
    message: str


class Limits(Protocol):
    """The fields of the recipe's `watchdog` section that are read here (see there for their meaning)."""

    @property
    def tail_ratio_warn(self) -> float | None: ...
    @property
    def tail_ratio_stop(self) -> float | None: ...
    @property
    def logprob_abs_diff_warn(self) -> float | None: ...
    @property
    def logprob_abs_diff_stop(self) -> float | None: ...
    @property
    def logprob_abs_diff_slope_stop(self) -> float | None: ...
    @property
    def grad_norm_spike_factor(self) -> float | None: ...
    @property
    def stop_on_nan(self) -> bool: ...
    @property
    def stop_on_zero_gradient(self) -> bool: ...
    @property
    def allocated_growth_warn_mb(self) -> float | None: ...
    @property
    def allocated_growth_stop_mb(self) -> float | None: ...
    @property
    def host_rss_growth_mb_per_step(self) -> float | None: ...
    @property
    def patience(self) -> int: ...


def evaluate(history: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """Findings about the last step of `history` (metrics of all steps, oldest first). Empty when all is well."""
    trained = [row for row in history if names.GRAD_NORM in row or names.RAW_REWARD in row]
    if not trained:
        return []
    rules: list[Callable[[Sequence[Mapping[str, Any]], Limits], list[Finding]]] = [
        _not_finite,
        _zero_gradient,
        _spike,
        _tail_ratio,
        _agreement,
        _allocated,
        _host_memory,
    ]
    return [finding for rule in rules for finding in rule(trained, limits)]


def stops(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that end the run."""
    return [finding for finding in findings if finding.level is Level.STOP]


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _not_finite(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    if not limits.stop_on_nan:
        return []
    watched = (names.RAW_REWARD, names.LOSS, names.GRAD_NORM, names.LOGPROB_ABS_DIFF, names.LOGPROB_KL)
    bad = [(name, float(rows[-1][name])) for name in watched if name in rows[-1] and not math.isfinite(rows[-1][name])]
    return [Finding(Level.STOP, "stop_on_nan", name, value, f"{name} is {value}") for name, value in bad]


def _zero_gradient(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """A gradient of exactly zero. One step may have it by right (all rewards equal); `patience` in a row may not."""
    recent = _values(rows, names.GRAD_NORM)[-limits.patience :]
    if not limits.stop_on_zero_gradient or not recent or recent[-1] != 0.0:
        return []
    lasting = len(recent) == limits.patience and not any(recent)
    level = Level.STOP if lasting else Level.WARN
    message = f"{names.GRAD_NORM} is exactly 0: every reward of every group was equal, or the adapter gets no gradient"
    return [Finding(level, "stop_on_zero_gradient", names.GRAD_NORM, 0.0, message)]


def _spike(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    norms = [value for value in _values(rows, names.GRAD_NORM) if math.isfinite(value)]
    factor = limits.grad_norm_spike_factor
    if factor is None or len(norms) < 4:
        return []
    earlier = sorted(norms[-21:-1])
    median = earlier[len(earlier) // 2]
    if median <= 0 or norms[-1] <= factor * median:
        return []
    message = f"{names.GRAD_NORM} is {norms[-1]:.4g}, {norms[-1] / median:.1f} times its median of {median:.4g}"
    return [Finding(Level.WARN, "grad_norm_spike_factor", names.GRAD_NORM, norms[-1], message)]


def _tail_ratio(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    values = _values(rows, names.SC_TAIL_RATIO)
    found = _lasting(values, limits.tail_ratio_stop, limits.patience, "tail_ratio_stop", names.SC_TAIL_RATIO)
    return found or _above(values, limits.tail_ratio_warn, "tail_ratio_warn", names.SC_TAIL_RATIO)


def _agreement(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    values = _values(rows, names.LOGPROB_ABS_DIFF)
    metric = names.LOGPROB_ABS_DIFF
    found = _lasting(values, limits.logprob_abs_diff_stop, limits.patience, "logprob_abs_diff_stop", metric)
    found = found or _above(values, limits.logprob_abs_diff_warn, "logprob_abs_diff_warn", metric)
    limit = limits.logprob_abs_diff_slope_stop
    if limit is not None and len(values) >= SLOPE_STEPS:
        rise = slope(values[-SLOPE_STEPS:]) * (SLOPE_STEPS - 1)
        if rise > limit:
            message = f"{metric} rose by {rise:.4g} over {SLOPE_STEPS} steps (limit {limit}): trainer and engine drift"
            found.append(Finding(Level.STOP, "logprob_abs_diff_slope_stop", metric, rise, message))
    return found


def _allocated(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """Allocated memory after a sync must return to its baseline, which is the second sync's (the first warms up)."""
    values = _values(rows, names.ALLOCATED_AFTER_SYNC_MB)
    if len(values) < 3:
        return []
    growth = values[-1] - values[1]
    for level, field in ((Level.STOP, "allocated_growth_stop_mb"), (Level.WARN, "allocated_growth_warn_mb")):
        limit = getattr(limits, field)
        if limit is not None and growth > limit:
            message = f"allocated memory after sync is {growth:.0f} MB above its baseline (limit {limit:g}): a leak"
            return [Finding(level, field, names.ALLOCATED_AFTER_SYNC_MB, growth, message)]
    return []


def _host_memory(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """A steady rise of host memory. Stops only when it lasted over two windows: caches fill up first."""
    values = _values(rows, names.HOST_RSS_MB)
    limit = limits.host_rss_growth_mb_per_step
    if limit is None or len(values) < SLOPE_STEPS:
        return []
    now = slope(values[-SLOPE_STEPS:])
    if now <= limit:
        return []
    before = values[-2 * SLOPE_STEPS : -SLOPE_STEPS]
    lasting = len(before) == SLOPE_STEPS and slope(before) > limit
    message = f"host memory of the workers grows by {now:.0f} MB a step (limit {limit:g})"
    level = Level.STOP if lasting else Level.WARN
    return [Finding(level, "host_rss_growth_mb_per_step", names.HOST_RSS_MB, now, message)]


def _above(values: Sequence[float], limit: float | None, rule: str, metric: str) -> list[Finding]:
    if limit is None or not values or not values[-1] > limit:
        return []
    return [Finding(Level.WARN, rule, metric, values[-1], f"{metric} is {values[-1]:.4g}, above {limit:g}")]


def _lasting(values: Sequence[float], limit: float | None, patience: int, rule: str, metric: str) -> list[Finding]:
    recent = values[-patience:]
    if limit is None or len(recent) < patience or not all(value > limit for value in recent):
        return []
    message = f"{metric} was above {limit:g} for {patience} steps (last {recent[-1]:.4g})"
    return [Finding(Level.STOP, rule, metric, recent[-1], message)]


def slope(values: Sequence[float]) -> float:
    """Least-squares rise of the values for one step."""
    n = len(values)
    middle, mean = (n - 1) / 2, sum(values) / n
    above = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(n))
