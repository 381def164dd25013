"""Publish to an engine in the same process, or behind a handle that reads the trainer's files: nothing is copied."""

import time
from pathlib import Path
from typing import Protocol

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.checkpoint.finite import TensorFileError
from k31core.sync.publisher import PublishedAdapter, SyncError

WEIGHTS_FILE = "adapter_model.safetensors"
"""Of every adapter directory."""


class AdapterSink(Protocol):
    """What takes an adapter: an engine."""

    async def load_adapter(self, directory: Path, version: int) -> str:
        """Serve `directory` as `version`; returns the digest of the tensors it now holds."""
        ...


class InProcessPublisher:
    """One engine. The digest of the file must be the digest the engine computes from its own memory."""

    def __init__(self, sink: AdapterSink) -> None:
        self._sink = sink

    async def publish(self, source: Path, version: int) -> PublishedAdapter:
        """Load `source` as `version`. Raises SyncError when the engine refuses it or holds something else."""
        begun = time.perf_counter()
        expected = source_digest(source, version)
        await confirm(self._sink, source, version, expected)
        size = (source / WEIGHTS_FILE).stat().st_size
        return PublishedAdapter(version, expected, size, time.perf_counter() - begun)


def source_digest(source: Path, version: int) -> str:
    """Digest of the adapter at `source`; SyncError when its file is missing or damaged."""
    try:
        return digest_of_file(source / WEIGHTS_FILE)
    except (OSError, TensorFileError) as error:
        raise SyncError(
            f"version {version}: the adapter at {source} cannot be read: {error}; export it again"
        ) from error


async def confirm(sink: AdapterSink, directory: Path, version: int, expected: str, name: str = "the engine") -> None:
    """Let `sink` load and compare digests; SyncError with both when they differ, or when the adapter is refused."""
    try:
        digest = await sink.load_adapter(directory, version)
    except ValueError as error:
        raise SyncError(f"version {version}: {name} refused the adapter: {error}") from error
    if digest != expected:
        raise SyncError(
            f"version {version}: {name} confirmed adapter {digest[:16]}, the trainer wrote {expected[:16]} into "
            f"{directory}; do not generate with it: publish again, and restart the engine if it stays so"
        )
