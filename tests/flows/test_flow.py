"""The flow against a real Prefect server and Ray, with small workers: what it records, resumes, refuses, repairs."""

import json
import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.flows, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def states(lab) -> dict[str, dict]:
    """Every flow run of this file, in four processes (a start costs seconds): final states by name."""
    lab.fault("lost-rollout", "rollout", "exit 5")
    lab.fault("lost-train", "train", "exit 5")
    lab.fault("futile", "train", "error 2 always")
    lab.fault("nan", "gradient", "nan 2")
    lab.fault("hung", "rollout", "hang 4")
    ends = {"killed": signal.SIGKILL, "interrupted": signal.SIGINT}
    processes = {run_id: lab.start(lab.parameters(run_id), K31_FAKE_SECONDS="0.4") for run_id in ends}
    for run_id, process in processes.items():
        lab.wait_for(run_id, "sync", 4)
        os.kill(process.pid, ends[run_id])
    for process in processes.values():
        process.wait(60)
    first = ["whole", "killed", "interrupted", "lost-rollout", "lost-train", "hung"]
    hurried = {"hung": ("cluster.phase_timeout_s=5",)}
    found = dict(zip(first, lab.run(*(lab.parameters(r, overrides=hurried.get(r, ())) for r in first))))
    (lab.runs / "after-first").write_text(json.dumps({run_id: snapshot(lab.runs / run_id) for run_id in first}))
    weights = lab.runs / "whole" / "adapters" / "step-00007" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    futile = lab.parameters("futile")
    second = {
        "damaged": lab.parameters("whole", steps=8, resume=True),
        "futile 1": futile,
        "futile 2": futile,
        "futile 3": futile,
        "futile 4": futile,
        "big": lab.parameters("big", overrides=("cluster.cpus_per_trainer=64", "cluster.bringup_timeout_s=1")),
        "foreign": lab.parameters("whole", overrides=("seed=5",)),
        "nothing": {"save_dir": str(lab.runs / "empty"), "resume": True},
        "nan": lab.parameters("nan", overrides=("save.interval=1",)),
    }
    return found | dict(zip(second, lab.run(*second.values())))


def snapshot(root: Path) -> dict:
    """What must be equal however a run got to its end."""
    directory = root / "adapters" / "step-00007"
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return {
        "save": {p.name: p.read_bytes().hex() for p in directory.iterdir() if p.name != "manifest.json"},
        "metrics": [{k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))} for row in rows],
        "prompts": (root / "prompts.jsonl").read_text(),
        "drawn": [int(line) for line in (root / "drawn.log").read_text().split()],
        "rows": rows,
    }


@pytest.fixture(scope="module")
def ends(lab, states) -> dict[str, dict]:
    """Snapshots of the runs of seven steps."""
    return json.loads((lab.runs / "after-first").read_text())


def test_a_run_records_every_phase_once(lab, states, ends) -> None:
    assert states["whole"]["name"] == "Completed", states["whole"]
    expected = ["attempt", "cluster", "resume", "sync", "eval"]
    for step in range(1, 8):
        expected += ["rollout", "train", "sync"] + ["save"] * (step in (3, 6, 7)) + ["eval"] * (step == 7)
    expected.append("report")
    assert [r["phase"] for r in lab.ledger("whole")][: len(expected)] == expected
    rows = ends["whole"]["rows"]
    assert [row["step"] for row in rows] == list(range(8))
    assert all(row["perf/orchestration_time"] < 1.0 for row in rows[1:])
    assert all(row["sync/canary_abs_diff"] == 0.0 for row in rows)
    assert (lab.runs / "whole" / "report" / "report.png").stat().st_size > 10_000
    assert len(ends["whole"]["prompts"].splitlines()) == 14


def test_the_ui_has_named_tasks_tables_and_adapters(lab, states) -> None:
    flow_run = lab.ledger("whole")[0]["outputs"]["flow_run_id"]
    tasks = lab.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200})
    names = {task["name"] for task in tasks}
    assert {
        "cluster",
        "rollout-00001",
        "train-00007",
        "sync-00007",
        "save-00006",
        "finish-step-00004",
        "report",
    } <= names
    artifacts = lab.post("/artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200})
    adapters = [json.loads(a["data"]) for a in artifacts if a["key"] == "k31-adapter-whole"]
    fields = [{row["field"]: row["value"] for row in table} for table in adapters]
    assert sorted(f["step"] for f in fields) == [3, 6, 7]
    assert all("k31 train --resume whole" in f["resume"] and f["reward"] and f["adapter digest"] for f in fields)
    tables = [json.loads(a["data"]) for a in artifacts if a["key"] == "k31-metrics-whole"]
    assert max(len(table) for table in tables) == 8
    assert [a["data"] for a in artifacts if a["key"] == "k31-progress-whole"] == [100.0]


@pytest.mark.parametrize("run_id", ["killed", "interrupted", "lost-rollout", "lost-train", "hung"])
def test_a_fault_changes_neither_bytes_nor_metrics_nor_prompts(states, ends, run_id: str) -> None:
    assert states[run_id]["name"] == "Completed", states[run_id]
    for what in ("save", "metrics", "prompts"):
        assert ends[run_id][what] == ends["whole"][what], what


def test_a_committed_rollout_is_never_drawn_again(lab, states, ends) -> None:
    assert ends["killed"]["drawn"] == ends["lost-train"]["drawn"] == list(range(1, 8))
    assert ends["hung"]["drawn"] == [1, 2, 3, 4, 4, 5, 6, 7], "a hung engine is replaced and its step drawn again"
    assert ends["lost-rollout"]["drawn"] == [1, 2, 3, 4, 5, 5, 6, 7], "the engine died while it drew step 5"
    restores = {run: sum(r["phase"] == "resume" for r in lab.ledger(run)) for run in ("lost-rollout", "lost-train")}
    assert restores == {"lost-rollout": 1, "lost-train": 2}, "only a lost trainer goes back to the last save"


def test_an_interruption_saves_what_is_whole(lab, states) -> None:
    ledger = lab.ledger("interrupted")
    stop = next(r for r in ledger if r["phase"] == "interrupted")
    assert stop["outputs"]["saved"] == stop["step"] == 4, "step 4 was trained and step 5 had not begun to train"
    before = [r for r in ledger if r["seq"] < stop["seq"]]
    assert (before[-1]["phase"], before[-1]["step"], before[-1]["inputs"]) == ("save", 4, {"interrupted": True})
    assert "k31 train --resume interrupted" in (lab.runs / "interrupted.log").read_text()


def test_a_damaged_newest_save_is_set_aside_and_the_older_one_used(lab, states) -> None:
    assert states["damaged"]["name"] == "Completed", states["damaged"]
    root = lab.runs / "whole"
    resume = [r for r in lab.ledger("whole") if r["phase"] == "resume"][-1]
    assert resume["step"] == 6 and "digest" in resume["outputs"]["rejected"][0]
    assert (root / "adapters" / "step-00007.bad-1" / "adapter_model.safetensors").read_bytes().endswith(b"?")
    assert (root / "adapters" / "step-00008" / "manifest.json").exists()


def test_what_cannot_work_stops_with_a_reason_and_is_not_retried(states) -> None:
    # the first attempt commits step 1, so the second and third are the two without progress
    expected = {
        "futile 1": "Failed",
        "futile 2": "Failed",
        "futile 3": "Failed",
        "futile 4": "Stopped",
        "big": "Failed",
    }
    expected |= {"foreign": "Stopped", "nothing": "Completed", "nan": "Stopped"}
    assert {name: states[name]["name"] for name in expected} == expected, states
    assert "2 attempts in a row committed nothing new after step 1" in states["futile 4"]["message"]
    assert "k31 train --resume futile" in states["futile 4"]["message"]
    assert "Ray cannot place" in states["big"]["message"] and "4 CPUs" in states["big"]["message"]
    assert "seed: 0 -> 5 (not allowed)" in states["foreign"]["message"]


def test_the_watchdog_stops_with_evidence(lab, states) -> None:
    assert "train/grad_norm is nan (watchdog.stop_on_nan)" in states["nan"]["message"]
    evidence = json.loads((lab.runs / "nan" / "watchdog-00002.json").read_text())
    assert evidence["step"] == 2 and evidence["findings"][0]["rule"] == "stop_on_nan"
    assert (lab.runs / "nan" / "rollouts" / "step-00002").exists()
