"""Publish to an engine on the same cards: every engine rank maps one flat buffer of the trainer rank on its card.

    every trainer rank: assemble its engine rank's payload, flatten, serialise the handle ──► one call to the engine
                        with all handles ──► the engine confirms ──► every trainer rank frees its buffer

A handle is what torch's own reducers make of a tensor: for CUDA memory an IPC handle, for CPU memory a file descriptor
(so that all of this runs without a card).
"""

import base64
import io
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from k31core.ops.digest import Bucket, Slot
from k31core.sync.buckets import EngineRank, InFlight, Payload, assemble, one_bucket, streamed
from k31core.sync.publisher import PublishedAdapter, SyncError

MetadataOf = Callable[[Slot], Any]
"""Makes the engine's own description of one tensor in a flat buffer."""


class TensorSink(Protocol):
    """An engine that takes an adapter by handle."""

    async def load_adapter_tensors(self, payloads: Sequence[str], version: int, digest: str) -> None:
        """Serve what the handles (one an engine rank) point at as `version`.

        Returns only when no handle is read any more and the engine calls its weights by version and digest.
        """
        ...


class TrainerSide(Protocol):
    """The trainer ranks, from the publisher's point of view."""

    async def export(self, version: int) -> list[str]:
        """Every rank makes its payload; handles in the order of the engine's ranks."""
        ...

    async def release(self, version: int) -> int:
        """Every rank frees its payload; returns the bytes of all."""
        ...


class IpcExporter:
    """One trainer rank's part: makes the handle of its engine rank's payload and keeps the memory behind it."""

    def __init__(self, rank: EngineRank, rename: Callable[[str], str], metadata_of: MetadataOf) -> None:
        self._rank, self._rename, self._metadata_of = rank, rename, metadata_of
        self.in_flight = InFlight()

    def export(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> tuple[str, Payload]:
        """(handle, what it points at). The memory stays until `release`."""
        payload = assemble(buckets, self._rank, self._rename)
        bucket = one_bucket(payload.tensors)
        self.in_flight.keep(version, bucket.data)
        return serialise(bucket, self._metadata_of), payload

    def release(self, version: int) -> int:
        """Free what `version` kept; returns the bytes."""
        return self.in_flight.release(version)


class CudaIpcPublisher:
    """Handles to the engine, confirmation back. One call at a time.

    The engine cannot digest what it has cut up for its kernels: it confirms the name that it serves by, which holds the
    digest; `sync.check_lora_weight_equal` makes it compare every tensor, and the canary compares what it computes.
    """

    def __init__(self, trainers: TrainerSide, sink: TensorSink, digest_of: Callable[[Path], str]) -> None:
        """`digest_of`: the digest that the trainer committed with an adapter directory."""
        self._trainers, self._sink, self._digest_of = trainers, sink, digest_of

    async def publish(self, source: Path, version: int) -> PublishedAdapter:
        """Send the adapter committed at `source`. Raises SyncError; the memory is freed in any case."""
        begun = time.perf_counter()
        digest = self._digest_of(source)
        payloads = await self._trainers.export(version)
        try:
            await self._sink.load_adapter_tensors(payloads, version, digest)
        except ValueError as error:
            raise SyncError(f"version {version}: the engine refused the adapter: {error}") from error
        finally:
            freed = await self._trainers.release(version)
        return PublishedAdapter(version, digest, freed, time.perf_counter() - begun)


async def send_base(
    tensors: Iterable[tuple[str, Tensor]],
    send: Callable[[str], Awaitable[None]],
    metadata_of: MetadataOf,
    bucket_bytes: int,
) -> int:
    """Stream the frozen base through the engine, a bucket at a time, each freed when it is confirmed; the bytes sent.

    For an engine without a host copy of its weights. `send` takes a handle and returns once the engine has copied it.
    """
    total = 0
    for piece in streamed(tensors, bucket_bytes):
        bucket = one_bucket(piece)
        await send(serialise(bucket, metadata_of))
        total += bucket.data.numel()
    return total


def serialise(bucket: Bucket, metadata_of: MetadataOf) -> str:
    """The handle of a flat buffer and the engine's description of what is in it, as base64 text."""
    import torch.multiprocessing  # noqa: F401  (registers torch's reducers with ForkingPickler)

    out = io.BytesIO()
    ForkingPickler(out).dump(
        {"flattened_tensor": bucket.data, "metadata": [metadata_of(slot) for slot in bucket.slots]}
    )
    return base64.b64encode(out.getvalue()).decode("ascii")
