"""The sync seam: a versioned adapter goes from the trainer to the engine. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class SyncError(RuntimeError):
    """An adapter that did not arrive whole: names version, digests and the next step."""


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """What the engine confirmed."""

    version: int
    digest: str
    """Digest of the logical tensors, equal on both sides."""
    bytes: int
    seconds: float


class Publisher(Protocol):
    """Delivers one adapter version; returns only when the engine confirmed it."""

    async def publish(self, source: Path, version: int) -> PublishedAdapter:
        """Send the adapter at `source` as `version`. Raises SyncError; the old version is served until then."""
        ...
