"""Publish to an engine on the same cards: every engine rank maps one flat buffer of the trainer rank on its card.

every trainer rank: assemble its engine rank's payload, flatten, serialise the handle ──► one call to the engine
                    with all handles ──► the engine confirms ──► every trainer rank frees its buffer
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from k31core.sync.buckets import EngineRank, InFlight, Payload, assemble, one_bucket
from k31core.sync.handles import HandleFormat, serialise

BASE = -1
"""What a piece of the base is kept under: there is one at a time, and it has no version."""


class IpcExporter:
    """One trainer rank's part: makes the handle of its engine rank's payload and keeps the memory behind it."""

    def __init__(self, rank: EngineRank, rename: Callable[[str], str], form: HandleFormat) -> None:
        self._rank, self._rename, self._form = rank, rename, form
        self.in_flight = InFlight()

    def export(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> tuple[str, Payload]:
        """(handle, what it points at). The memory stays until `release`."""
        payload = assemble(buckets, self._rank, self._rename)
        bucket = one_bucket(payload.tensors)
        self.in_flight.keep(version, bucket.data)
        return serialise(bucket, self._form), payload

    def release(self, version: int) -> int:
        """Free what `version` kept; returns the bytes."""
        return self.in_flight.release(version)


class BaseStream:
    """One trainer rank's part of sending the frozen base again: one flat piece after another, one alive at a time.

    For an engine without a host copy of its weights.
    """

    def __init__(self, pieces: Iterator[list[tuple[str, Tensor]]], form: HandleFormat, in_flight: InFlight) -> None:
        """`pieces`: whole logical tensors in the checkpoint's names; making one is a collective over the ranks."""
        self._pieces, self._form, self._in_flight = pieces, form, in_flight
        self._kept = False

    def next(self) -> str | None:
        """The handle of the next piece, once the engine is done with the last one; None after the last."""
        if self._kept:
            self._in_flight.release(BASE)
            self._kept = False
        piece = next(self._pieces, None)
        if piece is None:
            return None
        bucket = one_bucket(dict(piece))
        self._in_flight.keep(BASE, bucket.data)
        self._kept = True
        return serialise(bucket, self._form)


def checksums_of(payload: Payload) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, as the engine computes it to compare."""
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in payload.tensors.items()
    }
