"""Work for the pool's tests, importable by its processes, without torch."""

import os
import time
from pathlib import Path


def named(directory: Path, shard: str) -> tuple[str, int]:
    """Leave a file called `shard`; (shard, process id)."""
    (directory / shard).write_text(str(os.getpid()))
    return shard, os.getpid()


def first_fails(directory: Path, shard: str) -> str:
    """`0` raises; the others leave a file when they begin and take long."""
    if shard == "0":
        raise ValueError("shard 0 is damaged")
    (directory / shard).write_text(str(os.getpid()))
    time.sleep(60)
    return shard


def end_abruptly(shard: str) -> str:
    """As a process does that the kernel kills for its memory."""
    os._exit(137)


def wait_forever(directory: Path, shard: str) -> str:
    """Leave the process's id and stay."""
    (directory / shard).write_text(str(os.getpid()))
    time.sleep(600)
    return shard
