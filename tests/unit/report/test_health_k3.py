"""Kimi-K3's health band in the report: cycle time, reward band, and AIME's rise with its standard error."""

import json
import math
from pathlib import Path

from k31core.recipe.load import load_recipe, resolve
from k31core.report.health import Mark, Statement, statements
from k31core.report.read import read_run


def lines_of(directory: Path, rows: list[dict[str, float]]) -> dict[str, Statement]:
    (directory / "recipe.json").write_text(resolve(load_recipe("k3-64xgb300")).model_dump_json())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {statement.what: statement for statement in statements(read_run(directory))}


def rows(step_time: float, reward: float) -> list[dict[str, float]]:
    plain = [{"step": n, "perf/step_time": step_time, "rollout/raw_reward": reward} for n in range(1, 11)]
    evals = {0: 11 / 30, 10: 14 / 30}
    for step, score in evals.items():
        plain.append({"step": step, "eval/aime": score, "eval/aime/problems": 30.0})
    return plain


def test_the_rise_of_aime_has_the_error_of_30_problems(tmp_path: Path) -> None:
    line = lines_of(tmp_path, rows(700.0, 0.6))["eval/aime, first → last"]
    assert line.value == "0.367 → 0.467 (+0.100)"
    one = math.sqrt(14 / 30 * 16 / 30 / 30)
    rise = math.sqrt(11 / 30 * 19 / 30 / 30 + 14 / 30 * 16 / 30 / 30)
    assert f"one evaluation ±{one:.3f}, of the rise ±{rise:.3f} (30 problems" in line.note
    assert 0.12 < rise < 0.13  # larger than the rise itself: one run proves little


def test_cycle_time_and_reward_against_the_published_band(tmp_path: Path) -> None:
    good = lines_of(tmp_path, rows(700.0, 0.6))
    assert good["perf/step_time, mean"].mark is Mark.GOOD
    assert good["perf/step_time, mean"].note == "published band 660 to 780"
    assert good["rollout/raw_reward, mean"].mark is Mark.GOOD
    bad = lines_of(tmp_path, rows(900.0, 0.3))
    assert bad["perf/step_time, mean"].mark is Mark.WATCH
    assert bad["rollout/raw_reward, mean"].mark is Mark.WATCH
