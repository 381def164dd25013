"""Ports from a folder like sysfs: which are bad, and what NCCL is told."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from k31core.cluster.infiniband import (
    BadPort,
    InfinibandError,
    NodePorts,
    bad_ports,
    decide,
    error_warnings,
    read_ports,
)
from tests.unit.cluster.sysfs_tree import DOWN, write_hcas, write_port


def test_reads_states_and_counters(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", counters={"link_downed": 3, "symbol_error": "N/A (no PMA)"})
    write_port(tmp_path, "mlx5_0", port=2, **DOWN)
    first, second = read_ports("n0", tmp_path).ports
    assert (first.name, first.state, first.phys_state, first.link_layer) == (
        "mlx5_0:1",
        "ACTIVE",
        "LinkUp",
        "InfiniBand",
    )
    assert first.counters == {"link_downed": 3, "link_error_recovery": 0}
    assert (second.name, second.up, first.up) == ("mlx5_0:2", False, True)


def test_a_machine_without_infiniband_has_no_ports(tmp_path: Path) -> None:
    node = read_ports("n0", tmp_path / "absent")
    assert node.ports == ()
    assert decide([node], []).nccl_ib_hca is None


def test_a_port_whose_files_are_gone_counts_as_down(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (bad,) = bad_ports(read_ports("n0", tmp_path))
    assert (bad.device, bad.port) == ("mlx5_0", 1)
    assert "unreadable" in bad.why


@pytest.mark.parametrize(
    "values",
    [DOWN, {"state": "2: INIT"}, {"phys_state": "2: Polling"}, {"state": "3: ARMED"}],
    ids=lambda v: "-".join(v.values()),
)
def test_a_port_that_is_not_up_is_left_out_exactly(tmp_path: Path, values: dict[str, str]) -> None:
    write_hcas(tmp_path)
    write_port(tmp_path, "mlx5_1", **values)
    node = read_ports("n0", tmp_path)
    decision = decide([node], bad_ports(node), min_per_node=11)
    assert decision.nccl_ib_hca == "^=mlx5_1:1"
    assert decision.used["n0"] == tuple(f"mlx5_{i}:1" for i in sorted(range(12), key=str) if i != 1)
    assert "mlx5_10:1" in decision.used["n0"]


def test_a_flapping_port_is_found_between_two_readings(tmp_path: Path) -> None:
    write_hcas(tmp_path, 4)
    write_port(tmp_path, "mlx5_2", counters={"link_downed": 7})
    before = read_ports("n0", tmp_path)
    assert bad_ports(before) == ()
    write_port(tmp_path, "mlx5_2", counters={"link_downed": 8})
    now = read_ports("n0", tmp_path)
    assert bad_ports(now) == ()
    assert bad_ports(now, before) == (BadPort("n0", "mlx5_2", 1, "flapping: link_downed 7->8"),)


def test_a_counter_that_was_reset_is_a_new_baseline(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", counters={"link_downed": 8})
    before = read_ports("n0", tmp_path)
    write_port(tmp_path, "mlx5_0", counters={"link_downed": 0})
    assert bad_ports(read_ports("n0", tmp_path), before) == ()


def test_a_port_that_vanished_is_left_out(tmp_path: Path) -> None:
    before = read_ports("n0", write_hcas(tmp_path / "a", 3))
    now = read_ports("n0", write_hcas(tmp_path / "b", 2))
    bad = bad_ports(now, before)
    assert [b.device for b in bad] == ["mlx5_2"]
    assert decide([now], bad).nccl_ib_hca == "^=mlx5_2:1"


def test_error_counters_warn_only(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", counters={"symbol_error": 1})
    before = read_ports("n0", tmp_path)
    write_port(tmp_path, "mlx5_0", counters={"symbol_error": 5})
    now = read_ports("n0", tmp_path)
    assert bad_ports(now, before) == ()
    (line,) = error_warnings(now, before)
    assert "n0 mlx5_0:1: symbol_error 1->5" in line


def test_one_value_for_all_nodes(tmp_path: Path) -> None:
    write_port(write_hcas(tmp_path / "a", 4), "mlx5_1", **DOWN)
    write_port(write_hcas(tmp_path / "b", 4), "mlx5_3", **DOWN)
    a, b = read_ports("a", tmp_path / "a"), read_ports("b", tmp_path / "b")
    decision = decide([a, b], [*bad_ports(a), *bad_ports(b)], min_per_node=2)
    assert decision.nccl_ib_hca == "^=mlx5_1:1,mlx5_3:1"
    assert decision.used == {"a": ("mlx5_0:1", "mlx5_2:1"), "b": ("mlx5_0:1", "mlx5_2:1")}


def test_too_few_names_node_devices_and_reason(tmp_path: Path) -> None:
    write_port(write_hcas(tmp_path / "a", 4), "mlx5_1", **DOWN)
    write_hcas(tmp_path / "b", 4)
    a, b = read_ports("a", tmp_path / "a"), read_ports("b", tmp_path / "b")
    with pytest.raises(InfinibandError) as error:
        decide([a, b], bad_ports(a), min_per_node=4)
    text = str(error.value)
    assert "node a: 3 usable of 4 ports, 4 needed" in text
    assert "mlx5_1:1 (state DOWN, physical state Disabled)" in text
    assert "node b: 3 usable of 4 ports" in text
    assert "mlx5_1:1 (bad on a)" in text


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (None, "^=mlx5_1:1"),
        ("^=mlx5_3", "^=mlx5_1:1,mlx5_3:1"),
        ("^=elsewhere", "^=mlx5_1:1,elsewhere"),
        ("=mlx5_0,mlx5_1", "=mlx5_0:1"),
        ("mlx5", "=mlx5_0:1,mlx5_10:1,mlx5_2:1,mlx5_3:1"),
        ("=mlx5_0", "=mlx5_0"),
        ("^=mlx5_1", "^=mlx5_1"),
    ],
)
def test_the_users_own_choice_is_kept(tmp_path: Path, user: str | None, expected: str) -> None:
    for name in ("mlx5_0", "mlx5_2", "mlx5_3", "mlx5_10"):
        write_port(tmp_path, name)
    write_port(tmp_path, "mlx5_1", **DOWN)
    node = read_ports("n0", tmp_path)
    assert decide([node], bad_ports(node), user_value=user).nccl_ib_hca == expected


def test_without_a_fault_the_users_value_is_untouched(tmp_path: Path) -> None:
    node = read_ports("n0", write_hcas(tmp_path, 2))
    decision = decide([node], [], user_value="^=mlx5_1")
    assert decision.nccl_ib_hca == "^=mlx5_1"
    assert decision.used == {"n0": ("mlx5_0:1",)}


def test_a_selection_of_bad_ports_only_is_an_error(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", **DOWN)
    write_port(tmp_path, "mlx5_1")
    node = read_ports("n0", tmp_path)
    with pytest.raises(InfinibandError, match=r"selects only ports that are bad: mlx5_0:1 on n0"):
        decide([node], bad_ports(node), user_value="=mlx5_0")


def test_a_device_from_nccl_log_is_left_out_with_all_its_ports(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0")
    write_port(tmp_path, "mlx5_1")
    write_port(tmp_path, "mlx5_1", port=2)
    node = read_ports("n0", tmp_path)
    decision = decide([node], [BadPort("n0", "mlx5_1", 0, "IBV_WC_RETRY_EXC_ERR")])
    assert decision.nccl_ib_hca == "^=mlx5_1:1,mlx5_1:2"


def test_a_list_longer_than_nccl_reads_is_an_error(tmp_path: Path) -> None:
    for i in range(33):
        write_port(tmp_path, f"mlx5_{i}", **DOWN)
    write_port(tmp_path, "mlx5_40")
    node = read_ports("n0", tmp_path)
    with pytest.raises(InfinibandError, match="33 entries and NCCL reads the first 32 only"):
        decide([node], bad_ports(node))


def test_records_survive_json(tmp_path: Path) -> None:
    write_port(write_hcas(tmp_path, 2), "mlx5_1", **DOWN)
    node = read_ports("n0", tmp_path)
    assert NodePorts.from_json(json.loads(json.dumps(asdict(node)))) == node
    record = json.loads(json.dumps(decide([node], bad_ports(node)).to_json()))
    assert record["decision"] == "infiniband"
    assert record["nccl_ib_hca"] == "^=mlx5_1:1"
    assert record["excluded"] == [
        {"node": "n0", "device": "mlx5_1", "port": 1, "why": "state DOWN, physical state Disabled"}
    ]
