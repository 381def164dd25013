"""Run a function on N gloo ranks: fork after one import of megatron-core, collect what each rank returns."""

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class RankFailedError(AssertionError):
    """A rank raised, died or hung: carries its traceback."""


def run_ranks(world: int, work: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """`work(rank, world, *arguments)` in `world` forked processes with a gloo group; results in rank order."""
    import megatron.core  # noqa: F401 - once, before the fork: it takes 12-30 s

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pids = [_fork(rank, world, Path(scratch), work, arguments) for rank in range(world)]
        _wait(pids, Path(scratch), timeout)
        results = [_result(Path(scratch), rank) for rank in range(world)]
    failed = [(rank, text) for rank, (kind, text) in enumerate(results) if kind == "raised"]
    failed += [(rank, text) for rank, (kind, text) in enumerate(results) if kind == "gone"]
    if failed:
        raise RankFailedError(f"rank {failed[0][0]} of {world} failed:\n{failed[0][1]}")
    return [value for _, value in results]


def _fork(rank: int, world: int, scratch: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    outcome: tuple[str, Any]
    try:
        outcome = ("returned", _in_group(rank, world, scratch, work, arguments))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    partial = scratch / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(scratch / f"{rank}.result")
    os._exit(0)  # no pytest teardown in the child


def _in_group(rank: int, world: int, scratch: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from k31core.parallel.cpu_device import cpu_device
    from k31core.parallel.groups import init_process_group

    init_process_group("gloo", f"file://{scratch}/store", rank, world, timeout_minutes=1)
    with cpu_device():
        return work(rank, world, *arguments)


def _wait(pids: list[int], scratch: Path, timeout: float) -> None:
    alive, deadline, grace = set(pids), time.monotonic() + timeout, 0.0
    while alive:
        for pid in list(alive):
            if os.waitpid(pid, os.WNOHANG)[0]:
                alive.discard(pid)
        raised = any(pickle.loads(path.read_bytes())[0] == "raised" for path in scratch.glob("*.result"))
        if raised and not grace:
            grace = time.monotonic() + 3  # the others wait for the failed rank
        if time.monotonic() > deadline or (grace and time.monotonic() > grace):
            for pid in alive:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            return
        time.sleep(0.02)


def _result(scratch: Path, rank: int) -> tuple[str, Any]:
    path = scratch / f"{rank}.result"
    return pickle.loads(path.read_bytes()) if path.exists() else ("gone", "killed: hung, or a peer failed first")
