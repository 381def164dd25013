"""What each engine rank gets of an adapter, put together bucket by bucket: no rank ever holds the whole adapter.

    logical tensors, some 2 GiB at a time ──► own experts' rows copied out ──► one flat payload for one engine rank

Legend: E experts, e experts of one engine rank.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k31core.ops.digest import Bucket, Digest, Flattener, digest_of_tensor
from k31core.sync.publisher import SyncError

EXPERTS = ".experts."
"""Part of the name of every factor that belongs to the routed experts."""


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One rank of the engine's expert parallelism."""

    index: int
    size: int
    num_experts: int
    """E."""

    def rows(self) -> range:
        """Its experts. Raises SyncError when the ranks cannot share them evenly."""
        if self.num_experts % self.size:
            raise SyncError(
                f"{self.num_experts} experts over {self.size} engine ranks leave a rest: set rollout.engine.ep_size to "
                f"a divisor"
            )
        count = self.num_experts // self.size
        return range(self.index * count, (self.index + 1) * count)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a logical factor: rows of a per-expert one `[E, …]`, all of a shared one `[1, …]`."""
        if EXPERTS not in name or tensor.shape[0] == 1:
            return tensor
        if tensor.shape[0] != self.num_experts:
            raise SyncError(
                f"{name} has {tensor.shape[0]} rows, expected {self.num_experts} experts or 1 shared factor"
            )
        own = self.rows()
        return tensor.narrow(0, own.start, len(own))


@dataclass(frozen=True, slots=True)
class Payload:
    """What one engine rank gets."""

    tensors: dict[str, Tensor]
    """The engine's name → this rank's part, copied: nothing here points into a bucket that is gone."""
    digests: dict[str, Digest]
    """Of the parts, to be compared on the other side."""
    largest_bucket_bytes: int
    """Most bytes of logical tensors that existed at a time while it was put together."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def assemble(buckets: Iterable[list[tuple[str, Tensor]]], rank: EngineRank, rename: Callable[[str], str]) -> Payload:
    """Copy this engine rank's parts out of a stream of logical tensors; a bucket may be reused once it is consumed."""
    tensors: dict[str, Tensor] = {}
    largest = 0
    for bucket in buckets:
        largest = max(largest, sum(tensor.numel() * tensor.element_size() for _, tensor in bucket))
        for name, tensor in bucket:
            new = rename(name)
            if new in tensors:
                raise SyncError(f"{name} came twice in one publication")
            tensors[new] = rank.part(name, tensor).detach().clone(memory_format=torch.contiguous_format)
    if not tensors:
        raise SyncError("the adapter has no tensors: nothing was published")
    return Payload(tensors, {name: digest_of_tensor(tensor) for name, tensor in tensors.items()}, largest)


def one_bucket(tensors: Mapping[str, Tensor]) -> Bucket:
    """All tensors in one flat buffer that belongs to the caller."""
    total = sum(tensor.numel() * tensor.element_size() + 16 for tensor in tensors.values())
    (bucket,) = Flattener(tensors, max(16, total)).buckets(digest=False)
    return bucket


class InFlight:
    """Memory that others read through a handle: kept alive until they confirmed, counted, never forgotten.

    A producer that frees its memory early lets the reader see other data or crash it; this is the race that image-level
    shims exist for. Few large buffers, each released by name, need none.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def keep(self, version: int, *tensors: Tensor) -> None:
        """Hold memory for a version."""
        self._kept[version] = (*self._kept.get(version, ()), *tensors)

    def release(self, version: int) -> int:
        """The readers of a version are done; returns the bytes let go. Raises SyncError for an unknown version."""
        if version not in self._kept:
            raise SyncError(f"version {version} is not in flight (kept: {sorted(self._kept) or 'none'})")
        return sum(t.numel() * t.element_size() for t in self._kept.pop(version))

    @property
    def num_bytes(self) -> int:
        """Bytes held now; must be 0 after every publication, or the export leaks."""
        return sum(t.numel() * t.element_size() for kept in self._kept.values() for t in kept)
