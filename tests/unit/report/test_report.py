"""The report reads what a run wrote, draws it, and says what is wrong with a file."""

import json
import math
from pathlib import Path

import pytest

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import load_recipe, resolve
from k31core.report.health import Mark, statements
from k31core.report.read import ReportError, read_run
from k31core.report.report import write_report


def _run(directory: Path, rows: list[dict[str, object]], tail: str = "") -> Path:
    (directory / "recipe.json").write_text(resolve(load_recipe("tiny")).model_dump_json())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return directory


def _row(step: int, reward: float) -> dict[str, object]:
    return {
        "step": step,
        "rollout/raw_reward": reward,
        "rollout/response_len/mean": 9.0,
        "rollout/truncated_ratio": 0.1,
        "train/grad_norm": 0.3,
        "train/train_rollout_logprob_abs_diff": 1e-6,
        "train/sc_tail_ratio": 1.1,
        "perf/rollout_time": 0.5,
        "perf/train_time": 0.3,
        "perf/step_time": 1.0,
        "reward/wrong": 3,
    }


def test_picture_and_page_are_written(tmp_path: Path) -> None:
    run = _run(tmp_path, [_row(i, 0.5 + 0.01 * i) for i in range(12)])
    paths = write_report(run)
    png = Path(paths["png"]).read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    page = Path(paths["html"]).read_text()
    assert "0.520 → 0.590 (+0.070)" in page
    assert not list((run / "report").glob(".report.tmp*"))


def test_first_and_last_five_and_marks(tmp_path: Path) -> None:
    falling = statements(read_run(_run(tmp_path, [_row(i, 1.0 - 0.1 * i) for i in range(10)])))
    assert falling[0].value == "0.800 → 0.300 (-0.500)"
    assert falling[0].mark is Mark.WATCH


def test_last_line_of_a_step_counts_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    run = read_run(_run(tmp_path, [_row(1, 0.2), _row(0, 0.1), _row(1, 0.9)], tail='{"step": 2, "roll'))
    assert run.series("rollout/raw_reward").steps == (0, 1)
    assert run.series("rollout/raw_reward").values == (0.1, 0.9)


def test_non_finite_values_are_not_drawn(tmp_path: Path) -> None:
    run = read_run(_run(tmp_path, [_row(0, 0.2), _row(1, math.nan), _row(2, 0.4)]))
    assert run.series("rollout/raw_reward").steps == (0, 2)


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    (_run(tmp_path, []) / "metrics.jsonl").write_text('{"step": 0}\nnot json\n{"step": 1}\n')
    with pytest.raises(ReportError, match="line 2"):
        read_run(tmp_path)


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not a run directory"):
        read_run(tmp_path)


def test_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    run = tmp_path / "<script>x"
    run.mkdir()
    _run(run, [_row(0, 0.5)])
    assert "<script>" not in Path(write_report(run)["html"]).read_text()
