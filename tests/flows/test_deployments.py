"""Deployments: what is declared is applied, a retry continues the same run, automations put a failed run back."""

import subprocess
import sys
import time

import pytest

from tests.flows.conftest import ROOT

pytestmark = [pytest.mark.flows, pytest.mark.timeout(900)]

APPLY = """
import pathlib, sys
from k31core.cluster.home import Home
from k31core.cli.deploy import apply_deployments
apply_deployments(Home(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), None, print)
"""
AUTOMATIONS = """
from k31core.cli.deploy import ROOT, apply_automations
for _ in range(2):
    apply_automations(ROOT / "deployments" / "automations.yaml")
"""


@pytest.fixture(scope="module")
def served(lab):
    """The small flow served as `k31/train`, as a runner process of its own."""
    log = (lab.runs / "serve.log").open("wb")
    environment = {**lab.environment, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    command = [sys.executable, "-m", "tests.flows.fakes.run_flow", "serve"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (found := lab.post("/deployments/filter", {"deployments": {"name": {"any_": ["train"]}}})):
            assert process.poll() is None and time.monotonic() < deadline, (lab.runs / "serve.log").read_text()[-2000:]
            time.sleep(0.3)
        yield found[0]["id"]
    finally:
        process.terminate()
        process.wait(30)


def create_run(lab, deployment: str, parameters: dict) -> str:
    body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
    return lab.post(f"/deployments/{deployment}/create_flow_run", body)["id"]


def wait_for_state(lab, flow_run: str, names: set[str], timeout_s: float = 150) -> dict:
    deadline = time.monotonic() + timeout_s
    while True:
        found = lab.get(f"/flow_runs/{flow_run}")
        if found["state_name"] in names:
            return found
        assert time.monotonic() < deadline, (found["state_name"], (lab.runs / "serve.log").read_text()[-3000:])
        time.sleep(0.3)


def test_a_retry_continues_the_same_run_and_loads_what_was_done(lab, served: str) -> None:
    lab.fault("retried", "train", "error 5")
    flow_run = create_run(lab, served, lab.parameters("retried", steps=6))
    wait_for_state(lab, flow_run, {"Failed"})
    command = [sys.executable, "-m", "prefect", "--no-prompt", "flow-run", "retry", flow_run]
    done = subprocess.run(command, env=lab.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = wait_for_state(lab, flow_run, {"Completed"})
    assert found["run_count"] == 2
    attempts = [r["outputs"] for r in lab.ledger("retried") if r["phase"] == "attempt"]
    assert [(a["flow_run_id"], a["run_count"]) for a in attempts] == [(flow_run, 1), (flow_run, 2)]
    tasks = lab.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200})
    states = {(task["name"], task["state_name"]) for task in tasks}
    assert ("rollout-00005", "Cached") in states, "the rollout before the failed step loads"
    assert ("train-00005", "Failed") in states and ("train-00005", "Completed") in states
    drawn = (lab.runs / "retried" / "drawn.log").read_text().split()
    assert drawn == [str(step) for step in range(1, 7)]
    trained = [r["step"] for r in lab.ledger("retried") if r["phase"] == "train"]
    assert trained == [1, 2, 3, 4, 5, 6], "the trainer was attached: nothing was trained twice"


def test_the_automation_retries_a_fault_and_stops_without_progress(lab, served: str) -> None:
    command = [sys.executable, "-c", AUTOMATIONS]
    subprocess.run(command, cwd=ROOT, env=lab.environment, check=True, timeout=120)
    lab.fault("auto", "train", "error 1 always")
    overrides = ("cluster.max_attempts_without_progress=1",)
    flow_run = create_run(lab, served, lab.parameters("auto", steps=4, overrides=overrides))
    found = wait_for_state(lab, flow_run, {"Stopped"}, timeout_s=240)
    assert found["run_count"] == 3, "one attempt that drew a rollout, one without progress, one that refused"
    assert "k31 train --resume auto" in found["state"]["message"]
    assert (lab.runs / "auto" / "drawn.log").read_text().split() == ["1"]


def test_what_is_declared_is_applied(lab) -> None:
    command = [sys.executable, "-c", APPLY, str(lab.home.root), str(lab.runs)]
    done = subprocess.run(
        command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    deployments = {d["name"]: d for d in lab.post("/deployments/filter", {})}
    assert set(deployments) == {"train", "resume", "prepare", "eval"}
    assert {deployments[name]["work_pool_name"] for name in ("resume", "prepare", "eval")} == {"k31"}
    assert [s["schedule"]["cron"] for s in deployments["resume"]["schedules"]] == ["*/30 * * * *"]
    assert deployments["resume"]["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert lab.get("/work_pools/k31")["concurrency_limit"] == 1
    automations = [a["name"] for a in lab.post("/automations/filter", {})]
    assert sorted(automations) == ["k31-crash-on-silence", "k31-retry-on-fault"], "applied twice, there once"
