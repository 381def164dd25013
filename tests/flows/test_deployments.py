"""Deployments: what is declared is applied, a retry continues the same run, automations put a failed run back."""

import json
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT

pytestmark = [pytest.mark.flows, pytest.mark.timeout(900)]

APPLY = """
import pathlib, sys
from k31core.cluster.home import Home
from k31core.cli.deploy import apply_deployments
apply_deployments(Home(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), "none", print)
"""
AUTOMATIONS = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from k31core.cli.deploy import ROOT, DeployError, apply_automations
text = {"subject": "{{subject}}", "body": "{{body}}"}
CustomWebhookNotificationBlock(name="team", url=sys.argv[1], json_data=text).save("team")
path = ROOT / "deployments" / "automations.yaml"
for _ in range(2):
    print(apply_automations(path, "custom-webhook/team"))
try:
    apply_automations(path, "custom-webhook/nobody")
except DeployError as error:
    print(error)
"""
LOCKED = """
import sys
from k31core.checkpoint.lock import LockedError
from tasks.run_directory import Request, open_run
try:
    open_run(Request("tiny", save_dir=sys.argv[1], run_id="cancelled", resume=True))
except LockedError as error:
    print(error)
"""
NOTHING_TO_RESUME = """
import pathlib, sys
from tasks.run_directory import newest_unfinished
assert newest_unfinished(pathlib.Path(sys.argv[1])) != "cancelled"
"""
PROFILE = "import sys; from k31core.cli.deploy import write_api_url; write_api_url(sys.argv[1])"


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


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A web hook's URL, and what it was sent."""
    messages: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", messages
    server.shutdown()


def test_the_automation_retries_a_fault_tells_the_block_and_stops_without_progress(lab, served: str, told) -> None:
    url, messages = told
    command = [sys.executable, "-c", AUTOMATIONS, url]
    done = subprocess.run(
        command, cwd=ROOT, env=lab.environment, check=True, timeout=120, capture_output=True, text=True
    )
    *applied, refused = done.stdout.splitlines()
    assert applied == ["['k31-retry-on-fault', 'k31-crash-on-silence', 'k31-notify']"] * 2
    assert "--notify-block custom-webhook/nobody: the Prefect server has no such block" in refused
    lab.fault("auto", "train", "error 1 always")
    overrides = ("cluster.max_attempts_without_progress=1",)
    flow_run = create_run(lab, served, lab.parameters("auto", steps=4, overrides=overrides))
    found = wait_for_state(lab, flow_run, {"Stopped"}, timeout_s=240)
    assert found["run_count"] == 3, "one attempt that drew a rollout, one without progress, one that refused"
    assert "k31 train --resume auto" in found["state"]["message"]
    assert (lab.runs / "auto" / "drawn.log").read_text().split() == ["1"]
    deadline = time.monotonic() + 60
    while not any(message["subject"].endswith(": Stopped") for message in messages):
        assert time.monotonic() < deadline, messages
        time.sleep(0.3)
    subjects = [message["subject"] for message in messages if message["subject"].startswith(f"k31 {found['name']}: ")]
    assert sorted(subject.rsplit(" ", 1)[1] for subject in subjects) == ["Failed", "Failed", "Stopped"], messages
    stopped = next(message for message in messages if message["subject"].endswith(": Stopped"))
    assert "k31 train --resume auto" in stopped["body"] and f"/flow-run/{flow_run}" in stopped["body"]


def test_a_cancel_saves_what_is_whole_and_is_not_taken_up_again(lab, served: str) -> None:
    lab.fault("cancelled", "rollout", "hang 5")
    flow_run = create_run(lab, served, lab.parameters("cancelled", steps=6))
    lab.wait_for("cancelled", "sync", 4)
    command = [sys.executable, "-c", LOCKED, str(lab.runs)]
    second = subprocess.run(
        command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "is in use by process" in second.stdout, "another flow run on this directory is told who holds it"
    lab.post(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for_state(lab, flow_run, {"Cancelled"})
    saved, stop = lab.ledger("cancelled")[-2:]
    assert (saved["phase"], saved["step"], saved["inputs"]) == ("save", 4, {"interrupted": True})
    assert (stop["phase"], stop["step"], stop["outputs"]) == ("interrupted", 4, {"saved": 4})
    command = [sys.executable, "-c", NOTHING_TO_RESUME, str(lab.runs)]
    subprocess.run(command, cwd=ROOT, env=lab.environment, check=True, timeout=60)


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
    assert sorted(automations) == ["k31-crash-on-silence", "k31-retry-on-fault"], "applied twice; no block any more"


def test_the_profile_gets_the_url(lab, tmp_path: Path) -> None:
    """The profile of the user's own Prefect home, not that of the services."""
    url = "http://127.0.0.1:4321/api"
    environment = {**lab.environment, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROFILE, url], cwd=ROOT, env=environment, check=True, timeout=120)
    profiles = tomllib.loads((tmp_path / ".prefect" / "profiles.toml").read_text())
    assert profiles["profiles"][profiles["active"]]["PREFECT_API_URL"] == url
    assert not (lab.home.prefect / "profiles.toml").exists()
