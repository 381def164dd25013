"""A small all-reduce over every rank: does the network carry data, how fast, and is the sum right.

First inside each node that holds several ranks (all nodes at once), then over all ranks: a slow or broken link inside a
node is told from one between nodes.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist


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

    def to_json(self) -> dict[str, Any]:
        """For the ledger and an artifact."""
        return {**asdict(self), "bus_gb_per_s": round(self.bus_gb_per_s, 3)}

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
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    buffer = torch.empty(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    buffer.fill_(rank + 1)
    dist.all_reduce(buffer, group=group)
    expected = ranks * (ranks + 1) / 2
    low, high = buffer.min().item(), buffer.max().item()
    wrong = torch.tensor([float((low, high) != (expected, expected))], device=device)
    dist.all_reduce(wrong, group=group)  # nobody goes on alone
    if wrong.item():
        raise BandwidthError(
            f"all-reduce over {name} ({ranks} ranks) gave values from {low} to {high} on rank {rank}, expected "
            f"{expected} everywhere ({wrong.item():.0f} ranks saw others): the network or a card corrupts data; look "
            f"at the InfiniBand error counters"
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


def measure_nodes(
    node: str, *, num_bytes: int, iterations: int = 5, device: str = "cpu", minimum_gb_per_s: float | None = None
) -> list[AllReduceResult]:
    """On every rank of the default group, which says on which `node` it runs: each node's all-reduce, then everyone's.

    The same list on every rank; one rank gives none. Raises BandwidthError on all ranks when one group's sum is wrong,
    or when all ranks together stay below `minimum_gb_per_s` on the bus.
    """
    if dist.get_world_size() == 1:
        return []
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, node)
    results: list[AllReduceResult] = []
    if len(set(nodes)) > 1:
        results += _inside_nodes(nodes, num_bytes=num_bytes, iterations=iterations, device=device)
    everyone = measure_all_reduce("all ranks", num_bytes=num_bytes, iterations=iterations, device=device)
    slowest = _first_said(everyone)
    if minimum_gb_per_s is not None:
        require_bandwidth(slowest, minimum_gb_per_s)
    return [*results, slowest]


def _inside_nodes(nodes: Sequence[str], *, num_bytes: int, iterations: int, device: str) -> list[AllReduceResult]:
    """Each node with several ranks by itself; a wrong sum on one is an error on all."""
    own, complaint = None, None
    for name in sorted(set(nodes)):
        ranks = [rank for rank, seen in enumerate(nodes) if seen == name]
        group = dist.new_group(ranks)  # every rank takes part in making every group
        if len(ranks) > 1 and dist.get_rank() in ranks:
            try:
                own = measure_all_reduce(
                    f"node {name}", num_bytes=num_bytes, iterations=iterations, group=group, device=device
                )
            except BandwidthError as error:
                complaint = str(error)
        dist.barrier()
        if dist.get_rank() in ranks:
            dist.destroy_process_group(group)
    said: list[Any] = [None] * len(nodes)
    dist.all_gather_object(said, (own, complaint))
    wrong = next((text for _, text in said if text is not None), None)
    if wrong is not None:
        raise BandwidthError(wrong)
    found = {result.group: result for result, _ in said if result is not None}
    return [found[name] for name in sorted(found)]


def _first_said(result: AllReduceResult) -> AllReduceResult:
    """Rank 0's measurement, on every rank."""
    box = [result]
    dist.broadcast_object_list(box, src=0)
    return box[0]


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
        torch.cuda.synchronize(device)
