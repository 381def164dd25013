"""How the benchmarks time work on the GPU."""

import statistics
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], repeats: int = 15) -> float:
    """Median time on the device of `run`, between two events, after warming up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
