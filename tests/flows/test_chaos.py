"""Three random kills of the command's own processes, and the same bytes at the end.

The same with the real tiny recipe and fifty kills is `k31 verify-resume`, by hand (see docs/verification).
"""

import pytest

from k31core.cli.chaos import Chaos, differences
from k31core.observe.jsonl import read_lines
from tests.flows.conftest import ROOT, SMALL

pytestmark = [pytest.mark.flows, pytest.mark.timeout(900)]


def test_three_kills_end_in_the_same_bytes(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("K31_FAKE_SECONDS", "0.3")
    arguments = ["--num-rollout", "8"] + [word for change in SMALL for word in ("--set", change)]
    entry = "tests.flows.fakes.command"
    whole = Chaos(lab.runs / "chaos-whole", lab.home, seed=0, entry=entry)
    whole.run(arguments, kills=0, timeout_s=400, say=print)
    killed = Chaos(lab.runs / "chaos-killed", lab.home, seed=4, targets=("flow", "engine", "trainer"), entry=entry)
    kills = killed.run(arguments, kills=3, timeout_s=600, say=print)
    assert len(kills) == 3, kills
    assert differences(whole.root, killed.root) == []
    restored = [r["step"] for r in read_lines(killed.root / "ledger.jsonl")[0] if r["phase"] == "resume" and r["step"]]
    said = killed.log.read_text()
    assert all(f"restored from step {step}: adapter, optimizer" in said for step in restored)
    # the comparison itself sees a difference
    metrics = killed.root / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/loss":', '"train/loss":1', 1))
    assert [d for d in differences(whole.root, killed.root) if "train/loss" in d]


def test_a_worker_that_was_made_but_never_started_is_not_attached_to(lab) -> None:
    """The engine dies while it comes up, so the flow run ends before it has told the trainer to start."""
    lab.fault("unborn", "init", "exit 0")
    parameters = lab.parameters("unborn", steps=2)
    first, second = lab.run(parameters, {**parameters, "resume": True})
    assert first["name"] == "Failed" and "engine did not start" in first["message"], first
    assert second["name"] == "Completed", second
