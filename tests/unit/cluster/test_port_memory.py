"""From one start to the next: a fault in the logs leaves a port out, and it stays out."""

import json
from pathlib import Path

from k31core.cluster.infiniband import bad_ports, decide, read_ports
from k31core.cluster.nccl_log import NcclFault
from k31core.cluster.port_memory import faults_in_logs, left_out_before, nccl_variables, remember_read
from k31core.cluster.survey import faulted_ports
from tests.unit.cluster.sysfs_tree import DOWN, write_hcas, write_port
from tests.unit.cluster.test_nccl_log import MIDDLE, NEW, NOISE, OLD


def new_faults(folder: Path) -> list[NcclFault]:
    faults, positions = faults_in_logs(folder)
    assert faults_in_logs(folder)[0] == faults, "until they are remembered"
    remember_read(folder, positions)
    return faults


def test_every_line_is_read_once_while_the_logs_grow(tmp_path: Path) -> None:
    log = tmp_path / "nccl.n0.7.log"
    log.write_text(f"{NOISE}\n{NEW}\n")
    (tmp_path / "sglang-0-node-1.log").write_text(f"{MIDDLE}\n{OLD}\n")
    (tmp_path / "other.log").write_text(f"{NEW}\n")
    faults = new_faults(tmp_path)
    assert [fault.device for fault in faults] == ["mlx5_1", "mlx5_10", None]
    assert new_faults(tmp_path) == []
    with log.open("a") as more:
        more.write(f"{NOISE}\n{NEW[:40]}")
    assert new_faults(tmp_path) == [], "a line that is still being written"
    with log.open("a") as more:
        more.write(f"{NEW[40:]}\n")
    assert [fault.device for fault in new_faults(tmp_path)] == ["mlx5_1"]
    log.with_suffix(".new").write_text(f"{NEW}\n")
    log.with_suffix(".new").replace(log)
    assert [fault.device for fault in new_faults(tmp_path)] == ["mlx5_1"], "another file of that name"
    bad = faulted_ports(faults)
    assert [(port.node, port.device, port.port) for port in bad] == [("node2", "mlx5_1", 0), ("node3", "mlx5_10", 0)]
    assert "IBV_WC_RETRY_EXC_ERR (peer 10.153.235.13<40554>)" in bad[0].why


def test_starts_of_one_run(tmp_path: Path) -> None:
    """Fault in start 1; start 2 leaves it out; start 3 still does; `readmit` and a repaired port let it in."""
    root = write_hcas(tmp_path / "ib", 4)
    node = read_ports("n0", root)
    assert nccl_variables(decide([node], []), tmp_path, {}) == {
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.log",
    }
    (tmp_path / "nccl.n0.7.log").write_text(f"{NEW}\n")
    write_port(root, "mlx5_3", **DOWN)
    node = read_ports("n0", root)
    second = decide([node], [*bad_ports(node), *faulted_ports(new_faults(tmp_path))])
    assert nccl_variables(second, tmp_path, {"NCCL_DEBUG": "INFO"})["NCCL_IB_HCA"] == "^=mlx5_1:1,mlx5_3:1"
    assert nccl_variables(second, tmp_path, {"NCCL_DEBUG": "INFO"})["NCCL_DEBUG"] == "INFO"
    recorded = json.loads(json.dumps(second.to_json()))

    write_port(root, "mlx5_3", state="4: ACTIVE", phys_state="5: LinkUp")
    node = read_ports("n0", root)
    third = decide([node], [*bad_ports(node), *left_out_before(recorded, readmit=False)])
    assert third.nccl_ib_hca == "^=mlx5_1:1"
    assert decide([node], left_out_before(third.to_json(), readmit=False)).nccl_ib_hca == "^=mlx5_1:1"
    assert decide([node], left_out_before(recorded, readmit=True)).nccl_ib_hca is None
    assert left_out_before(None, readmit=False) == []
    kept = sorted(port.device for port in left_out_before(recorded, readmit=True, workers_alive=True))
    assert kept == ["mlx5_1", "mlx5_3"], "living workers are not started anew for a port that came back"


def test_no_variables_without_ports(tmp_path: Path) -> None:
    assert nccl_variables(decide([read_ports("n0", tmp_path / "none")], []), tmp_path, {}) == {}
