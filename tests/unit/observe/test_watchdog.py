"""Watchdog rules on histories made for them; limits are the tiny recipe's."""

import math

import pytest

from k31core.observe.watchdog import Level, evaluate, slope, stops
from k31core.recipe.algorithm import WatchdogRecipe

LIMITS = WatchdogRecipe()


def history(steps: int = 12, **changes) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "rollout/raw_reward": 0.5,
            "train/loss": 0.1,
            "train/grad_norm": 0.01,
            "train/train_rollout_logprob_abs_diff": 0.015,
            "train/sc_tail_ratio": 1.2,
            "memory/allocated_after_sync_mb": 1000.0,
            "memory/host_rss_mb": 5000.0,
        }
        row.update({name.replace("__", "/"): change(step) for name, change in changes.items()})
        rows.append(row)
    return rows


def rules(rows, limits=LIMITS) -> dict[str, Level]:
    return {finding.rule: finding.level for finding in evaluate(rows, limits)}


def test_a_healthy_run_has_no_findings() -> None:
    assert evaluate(history(), LIMITS) == []
    assert evaluate([], LIMITS) == []
    assert evaluate([{"step": 0, "eval/heldout": 0.3}], LIMITS) == []


@pytest.mark.parametrize("name", ["rollout__raw_reward", "train__loss", "train__grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stops(name: str, value: float) -> None:
    rows = history(**{name: lambda step: value if step == 12 else 0.1})
    assert rules(rows)["stop_on_nan"] is Level.STOP
    assert "stop_on_nan" not in rules(rows, LIMITS.model_copy(update={"stop_on_nan": False}))


def test_zero_gradient_warns_once_and_stops_when_it_lasts() -> None:
    assert rules(history(train__grad_norm=lambda s: 0.0 if s == 12 else 0.01)) == {"stop_on_zero_gradient": Level.WARN}
    lasting = history(train__grad_norm=lambda s: 0.0 if s >= 10 else 0.01)
    assert rules(lasting)["stop_on_zero_gradient"] is Level.STOP


def test_a_gradient_spike_only_warns_however_high() -> None:
    rows = history(train__grad_norm=lambda s: 1e6 if s == 12 else 0.01)
    assert rules(rows) == {"grad_norm_spike_factor": Level.WARN}


def test_tail_ratio_warns_above_three_and_stops_above_ten_for_three_steps() -> None:
    assert rules(history(train__sc_tail_ratio=lambda s: 4.0)) == {"tail_ratio_warn": Level.WARN}
    assert rules(history(train__sc_tail_ratio=lambda s: 11.0 if s >= 11 else 1.2)) == {"tail_ratio_warn": Level.WARN}
    assert rules(history(train__sc_tail_ratio=lambda s: 11.0 if s >= 10 else 1.2)) == {"tail_ratio_stop": Level.STOP}
    # an isolated fall ends the series
    dip = history(train__sc_tail_ratio=lambda s: 2.0 if s == 11 else 11.0)
    assert rules(dip) == {"tail_ratio_warn": Level.WARN}


def test_agreement_by_level_and_by_slope() -> None:
    name = "train__train_rollout_logprob_abs_diff"
    assert rules(history(**{name: lambda s: 0.06})) == {"logprob_abs_diff_warn": Level.WARN}
    assert rules(history(**{name: lambda s: 0.3}))["logprob_abs_diff_stop"] is Level.STOP
    rising = history(**{name: lambda s: 0.015 + 0.007 * (s - 2) if s > 2 else 0.015})
    assert rules(rising)["logprob_abs_diff_slope_stop"] is Level.STOP
    slow = history(**{name: lambda s: 0.015 + 0.001 * s})
    assert rules(slow) == {}


def test_memory_after_a_sync_must_return_to_its_baseline() -> None:
    name = "memory__allocated_after_sync_mb"
    assert rules(history(**{name: lambda s: 200.0 if s == 1 else 1000.0})) == {}, "the first sync is warm-up"
    assert rules(history(**{name: lambda s: 1000.0 + 60 * s})) == {"allocated_growth_warn_mb": Level.WARN}
    assert rules(history(**{name: lambda s: 1000.0 + 600 * s})) == {"allocated_growth_stop_mb": Level.STOP}


def test_host_memory_slope_warns_then_stops() -> None:
    growing = {"memory__host_rss_mb": lambda s: 5000.0 + 600 * s}
    assert rules(history(12, **growing)) == {"host_rss_growth_mb_per_step": Level.WARN}
    assert rules(history(20, **growing)) == {"host_rss_growth_mb_per_step": Level.STOP}


def test_reward_never_stops_a_run() -> None:
    assert evaluate(history(rollout__raw_reward=lambda s: 0.9 if s < 6 else 0.0), LIMITS) == []


def test_every_rule_has_an_off_switch_of_its_name() -> None:
    bad = history(
        20,
        train__sc_tail_ratio=lambda s: 50.0,
        train__train_rollout_logprob_abs_diff=lambda s: 0.1 * s,
        train__grad_norm=lambda s: 100.0 if s == 20 else 0.01,
        memory__allocated_after_sync_mb=lambda s: 1000.0 * s,
        memory__host_rss_mb=lambda s: 1000.0 * s,
        train__loss=lambda s: math.nan,
    )
    off = {}
    for _ in range(12):
        found = evaluate(bad, LIMITS.model_copy(update=off))
        if not found:
            break
        off[found[0].rule] = False if found[0].rule.startswith("stop_on") else None
    assert found == [] and len(off) >= 8
    assert stops(evaluate(bad, LIMITS))


def test_slope_is_the_least_squares_slope() -> None:
    np = pytest.importorskip("numpy")
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    assert slope(values) == pytest.approx(np.polyfit(range(len(values)), values, 1)[0])
