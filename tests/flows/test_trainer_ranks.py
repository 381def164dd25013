"""Two trainer ranks over gloo: when one dies or fails alone, nobody waits, and the run ends in the same bytes.

The limit on a phase is two hours here: a test that waited for it would not end.
"""

import json
import os
import random
import signal
import time

import pytest

from k31core.cli.chaos import Chaos, differences
from tests.flows.conftest import ROOT, SMALL

pytestmark = [pytest.mark.flows, pytest.mark.timeout(900)]
TWO = ("train.backend=megatron", "train.parallel.dp=2", "cluster.phase_timeout_s=7200")


@pytest.fixture(scope="module")
def ended(lab) -> dict[str, dict]:
    """Final states of an undisturbed run and of one whose second rank raises alone, then resumed; meanwhile one rank of
    a third run is killed from outside at a random moment."""
    moment = random.Random(3)
    killed = lab.start(lab.parameters("ranks-killed", overrides=TWO), K31_FAKE_SECONDS="0.4")
    lab.wait_for("ranks-killed", "save", 3)
    lab.wait_for("ranks-killed", "rollout", 5)
    time.sleep(moment.uniform(0.0, 0.8))
    workers = json.loads((lab.runs / "ranks-killed" / "workers.json").read_bytes())
    os.kill(workers[f"trainer-{moment.randrange(2)}"], signal.SIGKILL)
    lab.fault("ranks-alone", "train", "error 5")
    first = ("ranks-whole", "ranks-alone")
    states = dict(zip(first, lab.run(*(lab.parameters(run_id, overrides=TWO) for run_id in first))))
    assert killed.wait(300) == 0
    return states


def restores(lab, run_id: str) -> list[int]:
    return [r["step"] for r in lab.ledger(run_id) if r["phase"] == "resume"]


def test_a_killed_rank_ends_the_step_and_the_run_goes_on_from_its_last_save(lab, ended) -> None:
    assert restores(lab, "ranks-whole") == [0]
    assert restores(lab, "ranks-killed") == [0, 3], "taken up once, in the same flow run, from the save of step 3"
    assert len([r for r in lab.ledger("ranks-killed") if r["phase"] == "attempt"]) == 1
    assert differences(lab.runs / "ranks-whole", lab.runs / "ranks-killed") == []
    drawn = [r["step"] for r in lab.ledger("ranks-killed") if r["phase"] == "rollout" and not r["inputs"]["reused"]]
    assert drawn == list(range(1, 8)), "rollouts that were there were used again"


def test_a_rank_that_fails_alone_ends_the_run_with_its_own_error(lab, ended) -> None:
    """The other rank waits for it in a collective; it is not waited for."""
    assert ended["ranks-alone"]["name"] == "Failed"
    assert "injected fault in train" in ended["ranks-alone"]["message"]
    assert [r["step"] for r in lab.ledger("ranks-alone") if r["phase"] == "train"] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_rank_that_dies_while_it_saves(lab, ended) -> None:
    lab.fault("ranks-died-in-save", "export", "exit 6")
    states = lab.run(
        lab.parameters("ranks-died-in-save", overrides=TWO), lab.parameters("ranks-alone", overrides=TWO, resume=True)
    )
    assert [state["name"] for state in states] == ["Completed", "Completed"], states
    assert restores(lab, "ranks-died-in-save") == [0, 3]
    for run_id in ("ranks-died-in-save", "ranks-alone"):
        assert differences(lab.runs / "ranks-whole", lab.runs / run_id) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_of_one_rank_alone(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("K31_FAKE_SECONDS", "0.2")
    arguments = ["--num-rollout", "24"] + [word for change in (*SMALL, *TWO) for word in ("--set", change)]
    entry = "tests.flows.fakes.command"
    whole = Chaos(lab.runs / "rank-chaos-whole", lab.home, seed=0, entry=entry)
    whole.run(arguments, kills=0, timeout_s=600, say=print)
    killed = Chaos(lab.runs / "rank-chaos", lab.home, seed=7, targets=("trainer",), entry=entry)
    kills = killed.run(arguments, kills=10, timeout_s=1500, say=print)
    assert len(kills) == 10, kills
    assert differences(whole.root, killed.root) == []
