"""`k31 train` shows the four lines users check, before anything else is started."""

import re
from pathlib import Path

import pytest

from k31core.checkpoint.store import StoreError
from k31core.cli import session
from k31core.cli.main import run
from k31core.recipe.load import START_LINES, load_recipe, resolve, start_lines

SEED = [
    "expert_model_parallel_size 8",
    "max_tokens_per_gpu 8192",
    "colocate_memory_peak_device gpu",
    "lora_base_cpu_backup True",
]


def test_the_lines_of_the_seed() -> None:
    assert start_lines(resolve(load_recipe("k3-64xgb300"))) == SEED
    assert [line.split()[0] for line in SEED] == list(START_LINES)


def test_a_run_prints_them_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends where services would be started: the lines are out by then."""

    def nothing_is_started(*_: object) -> None:
        raise StoreError("far enough")

    monkeypatch.setattr(session, "bring_up", nothing_is_started)
    assert run(["train", "--recipe", "k3-64xgb300", "--save-dir", str(tmp_path / "runs"), "--run-id", "r"]) != 0
    out = capsys.readouterr().out
    first, *rest = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert first.startswith("run r: k3-64xgb300, 1000 steps")
    assert rest == SEED
