"""A small all-reduce over every rank: does the network carry data, how fast, and is the sum right."""

import time
from dataclasses import dataclass
from typing import Any


class BandwidthError(RuntimeError):
    """An all-reduce that gave a wrong sum or was slower than the limit: names the group and the numbers."""


@dataclass(frozen=True, slots=True)
class AllReduceResult:
    """Bandwidth of one group, as nccl-tests count it."""

    group: str
    ranks: int
    bytes: int
    seconds: float
    """Of one all-reduce, the mean over the iterations."""

    @property
    def algorithm_gb_per_s(self) -> float:
        """Bytes of the buffer over time."""
        return self.bytes / self.seconds / 1e9

    @property
    def bus_gb_per_s(self) -> float:
        """Bytes that cross each rank's link over time: times 2 (n − 1) / n."""
        return self.algorithm_gb_per_s * 2 * (self.ranks - 1) / self.ranks


def measure_all_reduce(
    name: str, *, num_bytes: int = 64 * 1024**2, iterations: int = 5, group: Any = None, device: str = "cpu"
) -> AllReduceResult:
    """Run on every rank of `group` (None is all): fp32 buffer of `num_bytes`, one warm-up, the sum checked.

    Raises BandwidthError when the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    buffer = torch.empty(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    buffer.fill_(rank + 1)
    dist.all_reduce(buffer, group=group)
    expected = ranks * (ranks + 1) / 2
    low, high = buffer.min().item(), buffer.max().item()
    if (low, high) != (expected, expected):
        raise BandwidthError(
            f"all-reduce over {name} ({ranks} ranks) gave values from {low} to {high}, expected {expected} everywhere: "
            f"the network or a card corrupts data; look at the InfiniBand error counters"
        )
    buffer.zero_()
    _synchronize(device)
    dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(iterations):
        dist.all_reduce(buffer, group=group)
    _synchronize(device)
    seconds = (time.perf_counter() - started) / iterations
    return AllReduceResult(name, ranks, buffer.numel() * 4, seconds)


def require_bandwidth(result: AllReduceResult, minimum_gb_per_s: float) -> None:
    """Raise BandwidthError when the bus bandwidth is below the limit."""
    if result.bus_gb_per_s < minimum_gb_per_s:
        raise BandwidthError(
            f"all-reduce over {result.group} ({result.ranks} ranks, {result.bytes / 1e6:.0f} MB): "
            f"{result.bus_gb_per_s:.2f} GB/s on the bus, at least {minimum_gb_per_s:.2f} expected; "
            f"run it per node to find the slow one"
        )


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
