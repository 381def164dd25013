"""NCCL's own lines (from public bug reports, hosts renamed), fed in pieces."""

import random
import tracemalloc
from pathlib import Path

import pytest

from k31core.cluster.nccl_log import LogFollower, NcclLogScanner, parse_line

NEW = (
    "[2026-09-09 10:46:33] node2:319733:319761 [1] transport/net_ib/p2p.cc:648 NCCL WARN NET/IB: Got completion from "
    "peer 10.153.235.13<40554> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) "
    "vendor_err=129 localGid ::ffff:1.1.2.2 remoteGids::ffff:1.1.1.4 hca mlx5_1"
)
MIDDLE = (
    "node3:185303:186751 [7] transport/net_ib.cc:2453 NCCL WARN NET/IB: Got completion from peer 10.99.91.63<51161> "
    "with status=12 opcode=129 len=0 vendor err 129 (Recv) hca mlx5_10"
)
OLD = (
    "node-2:5776:5902 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with "
    "error 12, opcode 0, len 0, vendor err 129 (Recv)"
)
EVENT = "node1:12:34 [3] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error"
PROTECTION = (
    "node1:1:2 [2] transport/net_ib.cc:2453 NCCL WARN NET/IB: Got completion from peer 10.0.0.1<1> with status=4 "
    "opcode=0 len=0 vendor err 81 (Send) hca mlx5_0"
)
NOISE = "node1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"


@pytest.mark.parametrize(
    ("line", "status", "host", "gpu", "device", "port", "peer", "lost"),
    [
        (NEW, "IBV_WC_RETRY_EXC_ERR", "node2", 1, "mlx5_1", None, "10.153.235.13<40554>", True),
        (MIDDLE, "IBV_WC_RETRY_EXC_ERR", "node3", 7, "mlx5_10", None, "10.99.91.63<51161>", True),
        (OLD, "IBV_WC_RETRY_EXC_ERR", "node-2", 0, None, None, "10.2.0.5<33092>", True),
        (EVENT, "port error", "node1", 3, "mlx5_3", 1, None, True),
        (PROTECTION, "IBV_WC_LOC_PROT_ERR", "node1", 2, "mlx5_0", None, "10.0.0.1<1>", False),
    ],
    ids=["2.30", "2.2x", "2.1x", "event", "other"],
)
def test_lines_of_several_versions(
    line: str, status: str, host: str, gpu: int, device: str | None, port: int | None, peer: str | None, lost: bool
) -> None:
    fault = parse_line(line)
    assert fault is not None
    assert (fault.status, fault.host, fault.gpu, fault.device, fault.port, fault.peer, fault.link_lost) == (
        status,
        host,
        gpu,
        device,
        port,
        peer,
        lost,
    )


@pytest.mark.parametrize("line", [NOISE, "", "loss 0.1", "NET/IB : no IP interface found"])
def test_other_lines_are_no_faults(line: str) -> None:
    assert parse_line(line) is None


def test_the_bare_name_is_a_fault_too() -> None:
    fault = parse_line("RuntimeError: NCCL error: remote process exited, IBV_WC_RETRY_EXC_ERR")
    assert fault is not None
    assert fault.link_lost
    assert fault.device is None


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size_find_the_same(seed: int) -> None:
    data = "\n".join([NOISE, NEW, "x" * 50_000, OLD, NOISE, EVENT, MIDDLE]).encode()
    rng = random.Random(seed)
    scanner, found, at = NcclLogScanner(), [], 0
    while at < len(data):
        step = rng.choice([1, 7, 100, 5000])
        found += scanner.feed(data[at : at + step])
        at += step
    found += scanner.finish()
    assert [f.device for f in found] == ["mlx5_1", None, "mlx5_3", "mlx5_10"]


def test_memory_stays_bounded_without_newlines() -> None:
    scanner, block = NcclLogScanner(), b"y" * 65536
    tracemalloc.start()
    for _ in range(500):
        assert scanner.feed(block) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    (fault,) = scanner.feed(b"\n" + NEW.encode() + b"\n")
    assert fault.device == "mlx5_1"


def test_a_file_is_followed_through_growth_and_replacement(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    follower = LogFollower(path)
    assert follower.poll() == []
    path.write_text(NOISE + "\n" + NEW[:60])
    assert follower.poll() == []
    with path.open("a") as file:
        file.write(NEW[60:] + "\n")
    assert [f.device for f in follower.poll()] == ["mlx5_1"]
    assert follower.poll() == []
    path.write_text(MIDDLE + "\n")
    assert [f.device for f in follower.poll()] == ["mlx5_10"]
