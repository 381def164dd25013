"""Shards over all cores: one process a shard, at most as many as there are cores, results as they come.

A fault in one shard ends the work at once (shards that have not begun never do), and no process outlives its parent:
a killed conversion leaves nobody behind who still writes. No torch here.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

_TICK_S = 1.0
_SMALL = 128 << 20


class ShardProcessError(RuntimeError):
    """A process that worked on a shard was killed from outside."""


def default_workers(nbytes: int) -> int:
    """Cores that this process may use; one for so few bytes that processes take longer to start."""
    return 1 if nbytes < _SMALL else len(os.sched_getaffinity(0))


def over_shards[T](
    work: Callable[[str], T],
    shards: Sequence[str],
    workers: int,
    tick: Callable[[], None] | None = None,
) -> Iterator[T]:
    """`work(shard)` for every shard, in the order of completion; `work` must be picklable. Raises the first fault.

    `tick` is called about every second while nothing completes.
    """
    count = min(workers, len(shards))
    if count <= 1:
        for shard in shards:
            yield work(shard)
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=begin_child)
    try:
        pending = {pool.submit(work, shard) for shard in shards}
        processes = list(pool._processes.values())  # public only from Python 3.14 on (terminate_workers)
        while pending:
            done, pending = wait(pending, _TICK_S, FIRST_COMPLETED)
            for job in done:
                yield job.result()
            if tick is not None and not done:
                tick()
    except BrokenProcessPool as error:
        raise ShardProcessError(
            "a conversion process was killed from outside, probably for want of memory: run the command again with "
            f"fewer --workers than {count}; finished shards are kept"
        ) from error
    except BaseException:
        for process in processes:  # what runs is a shard of minutes: ended, not waited for; nothing of it is kept
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def begin_child() -> None:
    """In each process: one thread of arithmetic, Ctrl-C is the parent's business, and its end is ours."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, which comes with the first shard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
