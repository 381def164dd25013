"""An InfiniBand port that is lost in training: found, left out exactly, and the run comes to its end.

Real Ray, ports in a folder that looks like sysfs, NCCL's own line in its log; with two ranks a real gloo all-reduce at
every bring-up. A bad port stays bad: a start that still used it would end in the same fault.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from k31core.cli.chaos import differences
from tests.flows.conftest import ROOT, Lab
from tests.unit.cluster.sysfs_tree import write_port

pytestmark = [pytest.mark.flows, pytest.mark.timeout(600)]
TWO = ("train.backend=megatron", "train.parallel.dp=2")


@pytest.fixture(scope="module")
def states(lab: Lab) -> dict[str, dict[str, str]]:
    """Four flow runs in one process: undisturbed, a lost link, too few ports, and `k31/resume` of that one."""

    def parameters(run_id: str, *overrides: str, **more: object) -> dict[str, object]:
        ports = lab.runs / f"ports-{run_id}"
        for device in ("mlx5_0", "mlx5_1", "mlx5_10"):
            write_port(ports, device)
        changes = ("save.interval=2", f"cluster.infiniband_root={ports}", *overrides)
        return lab.parameters(run_id, steps=4, overrides=changes, **more)

    (lab.runs / "hca-log.bad-hca").write_text("mlx5_1 3")
    (lab.runs / "hca-few.bad-hca").write_text("mlx5_1 3\nmlx5_10 4 down")
    asked = {
        "whole": parameters("hca-whole"),
        "log": parameters("hca-log", "cluster.min_hcas_per_node=2"),
        "few": parameters("hca-few", *TWO, "cluster.min_hcas_per_node=3"),
        "few resumed": parameters("hca-few", *TWO, "cluster.min_hcas_per_node=1", resume=True),
    }
    command = [sys.executable, "-m", "tests.flows.fakes.run_link_flow", *map(json.dumps, asked.values())]
    done = subprocess.run(
        command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=550, check=False
    )
    (lab.runs / "hca.console").write_text(done.stdout + done.stderr)
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("STATE ")]
    assert len(found) == len(asked), done.stdout[-3000:] + done.stderr[-3000:]
    return dict(zip(asked, found))


def network(root: Path) -> list[tuple[int, str | None]]:
    """(step, NCCL_IB_HCA) of every start of a step by rank 0."""
    lines = [json.loads(line) for line in (root / "network.jsonl").read_text().splitlines()]
    return [(line["step"], line["NCCL_IB_HCA"]) for line in lines if line["rank"] == 0]


def surveys(lab: Lab, run_id: str) -> list[dict]:
    return [line["outputs"]["infiniband"] for line in lab.ledger(run_id) if line["phase"] == "cluster"]


def test_a_fault_in_nccls_log_leaves_the_device_out_and_the_run_ends_in_the_same_bytes(lab: Lab, states) -> None:
    assert states["log"]["name"] == "Completed", states["log"]
    root = lab.runs / "hca-log"
    assert network(root) == [(1, None), (2, None), (3, None), (3, "^=mlx5_1:1"), (4, "^=mlx5_1:1")]
    assert differences(lab.runs / "hca-whole", root) == []
    before, after = surveys(lab, "hca-log")
    assert (before["nccl_ib_hca"], after["nccl_ib_hca"]) == (None, "^=mlx5_1:1")
    (left_out,) = after["excluded"]
    assert left_out["device"] == "mlx5_1" and left_out["node"] == platform.node()
    assert left_out["why"] == "IBV_WC_RETRY_EXC_ERR (peer 10.0.0.2<42024>)"
    assert list(after["used"].values()) == [["mlx5_0:1", "mlx5_10:1"]], "mlx5_10 is another device"


def test_too_few_ports_stop_the_run_with_node_and_device(states) -> None:
    assert states["few"]["name"] == "Failed"
    message = states["few"]["message"]
    assert f"node {platform.node()}: 2 usable of 3 ports, 3 needed (cluster.min_hcas_per_node)" in message
    assert "left out: mlx5_1:* (IBV_WC_RETRY_EXC_ERR" in message


def test_a_resume_goes_on_with_the_exclusion_and_a_port_that_goes_down_joins_it(lab: Lab, states) -> None:
    assert states["few resumed"]["name"] == "Completed", states["few resumed"]
    first, second = "^=mlx5_1:1", "^=mlx5_1:1,mlx5_10:1"
    assert network(lab.runs / "hca-few")[-4:] == [(3, first), (4, first), (3, second), (4, second)]
    assert sorted(bad["why"] for bad in surveys(lab, "hca-few")[-1]["excluded"]) == [
        "IBV_WC_RETRY_EXC_ERR (peer 10.0.0.2<42024>)",
        "state DOWN, physical state Disabled",
    ]
    weights = Path("adapters") / "step-00004" / "adapter_model.safetensors"
    assert (lab.runs / "hca-few" / weights).read_bytes() == (lab.runs / "hca-whole" / weights).read_bytes()


def test_the_decision_and_the_bandwidth_are_shown(lab: Lab, states) -> None:
    console = (lab.runs / "hca.console").read_text()
    assert f"InfiniBand: mlx5_1:* of {platform.node()} is left out: IBV_WC_RETRY_EXC_ERR" in console
    assert "every worker gets NCCL_IB_HCA=^=mlx5_1:1" in console
    measured = [line["outputs"]["all_reduce"] for line in lab.ledger("hca-few") if line["phase"] == "network"]
    assert [(r["group"], r["ranks"]) for results in measured for r in results] == [("all ranks", 2)] * 3
    assert all(results[0]["bus_gb_per_s"] > 0 for results in measured)
    flow_runs = [line["outputs"]["flow_run_id"] for line in lab.ledger("hca-few") if line["phase"] == "attempt"]
    artifacts = lab.post("/artifacts/filter", {"flow_runs": {"id": {"any_": flow_runs}}, "limit": 200})
    tables = [a for a in artifacts if a["key"] == "k31-cluster-hca-few"]
    text = "\n".join(a["description"] for a in tables)
    assert "**Left out:** mlx5_1:* of" in text and "NCCL_IB_HCA=^=mlx5_1:1" in text
    assert "All-reduce over all ranks (2 ranks" in text
    assert {json.loads(a["data"])[0]["HCA ports"] for a in tables} >= {"mlx5_0:1, mlx5_1:1, mlx5_10:1", "mlx5_0:1"}
