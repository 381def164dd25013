"""Run a function on N ranks (gloo, or NCCL with a GPU each): a server process imports megatron-core once and forks the
ranks from there.

The server is clean (no threads of Ray or Prefect, no autograd threads of other tests), which a fork of the test process
itself would not be.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_SERVER_IMPORTS = ["megatron.core", "megatron.core.pipeline_parallel.schedules", "megatron.core.transformer"]
_SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class RankFailedError(AssertionError):
    """A rank raised, died or hung: carries its traceback."""


def run_ranks(
    world: int, work: Callable[..., Any], *arguments: Any, timeout: float = 150.0, backend: str = "gloo"
) -> list[Any]:
    """`work(rank, world, *arguments)` in `world` processes with a process group; results in rank order.

    `work` must be importable by name. The first call starts the server, which imports for 12-30 s.
    """
    # megatron-core's import starts CUDA where there is some, and then a fork cannot use it
    server = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
    server.set_forkserver_preload(_SERVER_IMPORTS)
    before = {name: os.environ.get(name) for name in _SERVER_ENVIRONMENT}
    os.environ.update(_SERVER_ENVIRONMENT)  # read by the server when it starts
    try:
        with tempfile.TemporaryDirectory() as scratch:
            ranks = [
                server.Process(target=_rank, args=(rank, world, scratch, backend, work, arguments))
                for rank in range(world)
            ]
            for process in ranks:
                process.start()
            _wait(ranks, Path(scratch), timeout)
            results = [_result(Path(scratch), rank) for rank in range(world)]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    failed = [(rank, text) for rank, (kind, text) in enumerate(results) if kind == "raised"]
    failed += [(rank, text) for rank, (kind, text) in enumerate(results) if kind == "gone"]
    if failed:
        raise RankFailedError(f"rank {failed[0][0]} of {world} failed:\n{failed[0][1]}")
    return [value for _, value in results]


def _rank(
    rank: int, world: int, scratch: str, backend: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    kind, value = "returned", None
    try:
        value = _in_group(rank, world, scratch, backend, work, arguments)
    except BaseException:
        kind, value = "raised", traceback.format_exc()
    partial = Path(scratch) / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(value))
    partial.rename(Path(scratch) / f"{rank}.{kind}")
    os._exit(0)  # gloo's threads need no orderly end


def _in_group(
    rank: int, world: int, scratch: str, backend: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import torch

    from k31core.parallel.cpu_device import cpu_device
    from k31core.parallel.groups import init_process_group

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    init_process_group(backend, f"file://{scratch}/store", rank, world, timeout_minutes=2)
    with cpu_device():
        return work(rank, world, *arguments)


def _wait(ranks: list[BaseProcess], scratch: Path, timeout: float) -> None:
    """Until all have ended, or shortly after one has failed, or the time is up; then the rest is killed."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(scratch.glob("*.raised")):
            deadline = min(deadline, time.monotonic() + 3)  # the others wait for the failed rank
        time.sleep(0.02)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


def _result(scratch: Path, rank: int) -> tuple[str, Any]:
    for kind in ("returned", "raised"):
        path = scratch / f"{rank}.{kind}"
        if path.exists():
            return kind, pickle.loads(path.read_bytes())
    return "gone", "killed: hung, or a peer failed first"
