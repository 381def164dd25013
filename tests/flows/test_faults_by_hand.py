"""By hand (`-m slow`): a full disk under a run, a run that saves nothing, a run that falls silent.

Their parts have tests in the default run; here they meet a whole flow, which takes minutes.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from k31core.cli.chaos import differences
from k31core.observe.jsonl import read_lines
from tests.flows.conftest import ROOT

pytestmark = [pytest.mark.flows, pytest.mark.slow, pytest.mark.timeout(900)]
SILENCE_S = 45
"""Heartbeats come every 30 s, which is the least that Prefect allows."""
DEPLOY = """
import pathlib, sys
from prefect.flows import Flow
from k31core.cli.deploy import ROOT, apply_automations, ensure_pool
declared = (ROOT / "deployments" / "automations.yaml").read_text()
assert declared.count("within: 90") == 1
path = pathlib.Path(sys.argv[1]) / "automations.yaml"
path.write_text(declared.replace("within: 90", f"within: {sys.argv[2]}"))
apply_automations(path)
ensure_pool()
flow = Flow.from_source(str(ROOT), entrypoint="tests/flows/fakes/run_flow.py:k31")
print(flow.deploy("train", work_pool_name="k31", build=False, push=False, print_next_steps=False))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_run_goes_on_after_its_disk_was_full(lab, disk: Path) -> None:
    there = {"save_dir": str(disk)}
    process = lab.start(lab.parameters("full", **there), K31_FAKE_SECONDS="0.4")
    deadline = time.monotonic() + 120
    while not any((r["phase"], r["step"]) == ("sync", 4) for r in read_lines(disk / "full" / "ledger.jsonl")[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
    process.wait(120)
    said = (lab.runs / "full.log").read_text()
    assert '"name": "Failed"' in said and "free some space" in said, said[-3000:]
    before = {path: path.read_bytes() for path in (disk / "full" / "adapters").rglob("*") if path.is_file()}
    (disk / "filler").unlink()
    states = lab.run(lab.parameters("full", resume=True, **there), lab.parameters("whole", **there))
    assert [state["name"] for state in states] == ["Completed", "Completed"], states
    assert all(path.read_bytes() == content for path, content in before.items() if path.exists()) and before
    assert differences(disk / "whole", disk / "full") == []


def test_skip_saving_saves_nothing_and_says_so(lab) -> None:
    (state,) = lab.run(lab.parameters("unsaved", steps=4, skip_saving=True))
    assert state["name"] == "Completed", state
    assert list((lab.runs / "unsaved" / "adapters").iterdir()) == []
    assert [r["step"] for r in lab.ledger("unsaved") if r["phase"] == "train"] == [1, 2, 3, 4]


def test_a_run_that_falls_silent_is_crashed_and_put_back(lab, tmp_path: Path) -> None:
    """Worker and flow process are killed at once: only the missing heartbeats tell. The next worker goes on."""
    command = [sys.executable, "-c", DEPLOY, str(tmp_path), str(SILENCE_S)]
    done = subprocess.run(
        command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    deployment = done.stdout.split()[-1]
    lab.fault("silent", "rollout", "hang 5")
    worker = start_worker(lab)
    try:
        body = {"parameters": lab.parameters("silent"), "state": {"type": "SCHEDULED"}}
        flow_run = lab.post(f"/deployments/{deployment}/create_flow_run", body)["id"]
        lab.wait_for("silent", "sync", 4, timeout_s=200)
        time.sleep(32)  # at least one heartbeat
        for process in [*psutil.Process(worker.pid).children(recursive=True), psutil.Process(worker.pid)]:
            process.kill()
        worker.wait(10)
        deadline = time.monotonic() + SILENCE_S + 90
        while (state := lab.get(f"/flow_runs/{flow_run}"))["state_name"] != "AwaitingRetry":
            assert time.monotonic() < deadline, state["state_name"]
            time.sleep(0.5)
        worker = start_worker(lab)
        deadline = time.monotonic() + 200
        while (state := lab.get(f"/flow_runs/{flow_run}"))["state_name"] != "Completed":
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
    finally:
        worker.send_signal(signal.SIGINT)
        worker.wait(60)
    assert state["run_count"] == 2
    assert {r["step"] for r in lab.ledger("silent") if r["phase"] == "train"} == set(range(1, 8))
    attempts = [r["outputs"] for r in lab.ledger("silent") if r["phase"] == "attempt"]
    assert [(a["flow_run_id"], a["run_count"]) for a in attempts] == [(flow_run, 1), (flow_run, 2)]


def start_worker(lab) -> subprocess.Popen[bytes]:
    environment = {**lab.environment, "PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    log = (lab.runs / "worker.log").open("ab")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", "k31", "--type", "process"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
