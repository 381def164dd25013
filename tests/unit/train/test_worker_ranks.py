"""By hand (`-m slow`): the trainer's process with two ranks, against one; a save of either continues on the other."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from k31core.recipe.load import load_recipe
from tests.unit.train.small_trainer import MODEL, OVERRIDES
from tests.unit.train.test_train_worker import make_rollout

pytestmark = pytest.mark.slow
LAYOUTS = {
    "tp2": ["train.parallel.tp=2", "train.parallel.ep=2"],
    "dp2": ["train.parallel.dp=2", "train.parallel.ep=2"],
    "pp2": ["train.parallel.pp=2", "train.parallel.first_stage_layers=4"],
}


def play(tmp_path, overrides, world, calls):
    """Replies of every rank to the same calls."""
    recipe = load_recipe("tiny", [*OVERRIDES, *overrides, *(["train.backend=megatron"] if world > 1 else [])])
    meeting = tmp_path / f"meeting-{len(list(tmp_path.glob('meeting-*')))}"
    meeting.touch()
    processes = []
    for rank in range(world):
        arguments = {
            "recipe_json": recipe.model_dump_json(),
            "run_dir": str(tmp_path),
            "model_dir": str(MODEL),
            "rank": rank,
            "world_size": world,
            "init_method": f"file://{meeting}.rendezvous" if world > 1 else "",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.unit.train.rank_process", json.dumps(arguments), json.dumps(calls)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
            )
        )
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(text.split("REPLIES ", 1)[1]) for text in outputs]


def exported(directory):
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_export_and_resume_like_one(tmp_path, layout):
    for step in (1, 2):
        make_rollout(tmp_path / f"r{step}", step)
    for name in ("one", "one2", "two", "two2", "crossed"):
        (tmp_path / name).mkdir()
    # a large eps keeps the first update a smooth function of the gradient
    overrides = ["train.optimizer.eps=1.0e-3", "train.optimizer.lr=1.0e-2"]

    def calls(first, second, restore=None):
        steps = [["start", []], ["restore", [restore]]]
        if restore is None:
            steps += [["train", [1, str(tmp_path / "r1")]], ["export", [1, str(tmp_path / first), True]]]
        return [*steps, ["train", [2, str(tmp_path / "r2")]], ["export", [2, str(tmp_path / second), True]]]

    (one,) = play(tmp_path, overrides, 1, calls("one", "one2"))
    two = play(tmp_path, [*overrides, *LAYOUTS[layout]], 2, calls("two", "two2"))
    for index in (2, 4):
        single, first, second = one[index], two[0][index], two[1][index]
        assert first["adapter_digest"] == second["adapter_digest"]
        assert first["metrics"]["train/loss"] == pytest.approx(single["metrics"]["train/loss"], rel=1e-4)
        assert first["metrics"]["train/grad_norm"] == pytest.approx(single["metrics"]["train/grad_norm"], rel=1e-4)
        assert two[0][index + 1]["adapter_digest"] == first["adapter_digest"]
    assert "B factors have a gradient" in two[0][2]["proof"]
    expected, found = exported(tmp_path / "one2"), exported(tmp_path / "two2")
    assert expected.keys() == found.keys()
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) < 2e-5
    # the two-rank save (adapter and moments) continues in one process
    (crossed,) = play(tmp_path, overrides, 1, calls("", "crossed", restore=str(tmp_path / "two")))
    assert crossed[1]["not_restored"] == []
    continued = exported(tmp_path / "crossed")
    assert max(float((continued[name] - found[name]).abs().max()) for name in found) < 2e-5
    assert any(not torch.equal(found[name], exported(tmp_path / "two")[name]) for name in found)
