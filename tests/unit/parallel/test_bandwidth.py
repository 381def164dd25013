"""Real gloo all-reduces between processes."""

import multiprocessing as mp
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k31core.parallel.bandwidth import (
    AllReduceResult,
    BandwidthError,
    measure_all_reduce,
    measure_nodes,
    require_bandwidth,
)


def _rank(rank: int, port: int, corrupt: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if corrupt and rank == 1:  # rank 1 takes part with another buffer: the sum is wrong on both
        buffer = torch.full((1024,), 5.0)
        dist.all_reduce(buffer)
        dist.all_reduce(torch.zeros(1))
        results.put("took part")
    else:
        try:
            results.put(measure_all_reduce("both", num_bytes=4096, iterations=3))
        except BandwidthError as error:
            results.put(str(error))
    dist.destroy_process_group()


def _run(corrupt: bool) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, corrupt, results)) for r in range(2)]
    for process in ranks:
        process.start()
    answers = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return answers


def test_two_ranks_measure_the_same_buffer() -> None:
    for result in _run(corrupt=False):
        assert (result.group, result.ranks, result.bytes) == ("both", 2, 4096)
        assert result.seconds > 0


def test_a_wrong_sum_is_an_error() -> None:
    answers = _run(corrupt=True)
    assert any("gave values from 6.0 to 6.0 on rank 0, expected 3.0 everywhere" in str(a) for a in answers)


def _node_rank(rank: int, rendezvous: str, nodes: list[str], minimum: float | None, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(nodes))
    try:
        results.put(measure_nodes(nodes[rank], num_bytes=4096, iterations=2, minimum_gb_per_s=minimum))
    except BandwidthError as error:
        results.put(str(error))
    dist.destroy_process_group()


def _nodes(folder: Path, nodes: list[str], minimum: float | None = None) -> list[Any]:
    context = mp.get_context("fork")
    results = context.Queue()
    rendezvous = f"file://{folder}/rendezvous-{len(nodes)}-{minimum}"
    ranks = [
        context.Process(target=_node_rank, args=(r, rendezvous, nodes, minimum, results)) for r in range(len(nodes))
    ]
    for process in ranks:
        process.start()
    answers = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return answers


def test_each_node_with_several_ranks_and_then_all_of_them(tmp_path: Path) -> None:
    answers = _nodes(tmp_path, ["b", "a", "b", "a", "c"])
    assert all(answer == answers[0] for answer in answers), "every rank has the same figures"
    assert [(result.group, result.ranks) for result in answers[0]] == [("node a", 2), ("node b", 2), ("all ranks", 5)]
    assert all(result.bus_gb_per_s > 0 for result in answers[0])
    assert answers[0][0].to_json()["bus_gb_per_s"] > 0


def test_one_node_is_measured_once_and_a_slow_network_is_named_on_every_rank(tmp_path: Path) -> None:
    assert [[r.group for r in answer] for answer in _nodes(tmp_path, ["a", "a"])] == [["all ranks"], ["all ranks"]]
    assert _nodes(tmp_path, ["a"]) == [[]]
    slow = _nodes(tmp_path, ["a", "a"], minimum=1e6)
    assert all("GB/s on the bus, at least 1000000.00 expected" in answer for answer in slow)


def test_bus_bandwidth_and_its_limit() -> None:
    result = AllReduceResult("stage 0", ranks=8, bytes=8 * 10**9, seconds=0.1)
    assert result.algorithm_gb_per_s == pytest.approx(80.0)
    assert result.bus_gb_per_s == pytest.approx(140.0)
    require_bandwidth(result, 100.0)
    with pytest.raises(BandwidthError, match=r"over stage 0 \(8 ranks, 8000 MB\): 140\.00 GB/s .* at least 200"):
        require_bandwidth(result, 200.0)
