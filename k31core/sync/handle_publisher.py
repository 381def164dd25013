"""Publish by handle: one call to the engine with a handle from every trainer rank. Torch-free.

every trainer rank: assemble its engine rank's payload, flatten, serialise the handle ──► one call to the engine
                    with all handles ──► the engine confirms ──► every trainer rank frees its buffer
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from k31core.sync.publisher import PublishedAdapter, SyncError


@dataclass(frozen=True, slots=True)
class Handles:
    """What the trainer ranks hand over."""

    payloads: list[str]
    """In the order of the engine's ranks."""
    checksums: dict[str, str] | None = None
    """Tensor → SHA-256, when the engine is to compare every one (`sync.check_lora_weight_equal`)."""


@dataclass(frozen=True, slots=True)
class Released:
    """What came back after a publication, over all ranks."""

    freed: int
    held: int
    """Bytes still kept for a reader; 0, or the export leaks."""


class TensorSink(Protocol):
    """An engine that takes an adapter by handle."""

    async def load_adapter_tensors(
        self, payloads: Sequence[str], version: int, digest: str, checksums: Mapping[str, str] | None = None
    ) -> None:
        """Serve what the handles (one an engine rank) point at as `version`.

        Returns only when no handle is read any more and the engine calls its weights by version and digest.
        """
        ...


class TrainerSide(Protocol):
    """The trainer ranks, from the publisher's point of view."""

    async def export(self, version: int) -> Handles:
        """Every rank makes its payload."""
        ...

    async def release(self, version: int) -> Released:
        """Every rank frees its payload."""
        ...


class HandlePublisher:
    """Handles to the engine, confirmation back. One call at a time.

    The engine cannot digest what it has cut up for its kernels: it confirms the name that it serves by, which holds the
    digest; `sync.check_lora_weight_equal` makes it compare every tensor, and the canary compares what it computes.
    """

    def __init__(self, trainers: TrainerSide, sink: TensorSink, digest_of: Callable[[Path], str]) -> None:
        """`digest_of`: the digest that the trainer has for an adapter."""
        self._trainers, self._sink, self._digest_of = trainers, sink, digest_of

    async def publish(self, source: Path, version: int) -> PublishedAdapter:
        """Send the adapter `source` (a name for `digest_of` only). Raises SyncError; the memory is freed in any case,
        and memory that does not come back is an error."""
        begun = time.perf_counter()
        digest = self._digest_of(source)
        handles = await self._trainers.export(version)
        try:
            await self._sink.load_adapter_tensors(handles.payloads, version, digest, handles.checksums)
        except ValueError as error:
            raise SyncError(f"version {version}: the engine refused the adapter: {error}") from error
        finally:
            released = await self._trainers.release(version)
        if released.held:
            raise SyncError(
                f"version {version}: {released.held} bytes of a publication were not freed: the export leaks; the "
                f"trainer must be restarted before the cards fill up"
            )
        return PublishedAdapter(version, digest, released.freed, time.perf_counter() - begun)
