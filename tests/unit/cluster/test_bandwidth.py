"""A real gloo all-reduce between two processes."""

import multiprocessing as mp
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k31core.cluster.bandwidth import AllReduceResult, BandwidthError, measure_all_reduce, require_bandwidth


def _rank(rank: int, port: int, corrupt: bool, results: Any) -> None:

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if corrupt and rank == 1:  # rank 1 takes part with another buffer: the sum is wrong on both
        buffer = torch.full((1024,), 5.0)
        dist.all_reduce(buffer)
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
    assert any("gave values from 6.0 to 6.0, expected 3.0 everywhere" in str(a) for a in answers)


def test_bus_bandwidth_and_its_limit() -> None:
    result = AllReduceResult("stage 0", ranks=8, bytes=8 * 10**9, seconds=0.1)
    assert result.algorithm_gb_per_s == pytest.approx(80.0)
    assert result.bus_gb_per_s == pytest.approx(140.0)
    require_bandwidth(result, 100.0)
    with pytest.raises(BandwidthError, match=r"over stage 0 \(8 ranks, 8000 MB\): 140\.00 GB/s .* at least 200"):
        require_bandwidth(result, 200.0)
