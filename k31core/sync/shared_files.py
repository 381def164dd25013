"""Publish through a directory every engine can read: copied once, committed by rename, loaded and confirmed by all."""

import asyncio
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.checkpoint.commit import new_staging
from k31core.observe.jsonl import fsync_directory
from k31core.sync.in_process import WEIGHTS_FILE, AdapterSink, confirm, source_digest
from k31core.sync.publisher import PublishedAdapter, SyncError

_VERSION = re.compile(r"version-(\d{6,})")


class SharedFilesPublisher:
    """Several engines, one shared directory."""

    def __init__(
        self, shared: Path | None, sinks: Mapping[str, AdapterSink], *, timeout_s: float = 1800.0, keep: int = 2
    ) -> None:
        """shared: None when the engines can read what is published where it lies. `sinks` by name, for errors.
        `keep`: versions left in `shared` after a publication."""
        if not sinks:
            raise ValueError("a publisher without engines: give at least one sink")
        self._shared, self._sinks = shared, dict(sinks)
        self._timeout_s, self._keep = timeout_s, keep

    async def publish(self, source: Path, version: int) -> PublishedAdapter:
        """Copy `source`, then load it in every engine at once.

        Raises SyncError, naming the engine, when one refuses, differs or does not answer in time. Engines that had
        already confirmed then serve the new version: publish it again before generating (requests name their version,
        so nothing mixes silently).
        """
        begun = time.perf_counter()
        expected = await asyncio.to_thread(source_digest, source, version)
        directory = source
        if self._shared is not None:
            directory = await asyncio.to_thread(self._place, self._shared, source, version, expected)
        answers = await asyncio.gather(
            *(self._load(name, sink, directory, version, expected) for name, sink in self._sinks.items()),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if self._shared is not None:
            await asyncio.to_thread(self._forget_old, self._shared)
        size = (directory / WEIGHTS_FILE).stat().st_size
        return PublishedAdapter(version, expected, size, time.perf_counter() - begun)

    async def _load(self, name: str, sink: AdapterSink, directory: Path, version: int, expected: str) -> None:
        try:
            await asyncio.wait_for(confirm(sink, directory, version, expected, name), self._timeout_s)
        except TimeoutError as error:
            raise SyncError(
                f"version {version}: {name} has not confirmed after {self._timeout_s:.0f} s (sync.timeout_s)"
            ) from error

    def _place(self, shared: Path, source: Path, version: int, expected: str) -> Path:
        """The adapter as `version-N` in the shared directory, its bytes read back."""
        final = shared / f"version-{version:06d}"
        shared.mkdir(parents=True, exist_ok=True)
        staging = new_staging(final)
        try:
            shutil.copytree(source, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns("optimizer"))
            for path in staging.rglob("*"):
                if path.is_file():
                    _fsync(path)
            seen = digest_of_file(staging / WEIGHTS_FILE)
            if seen != expected:
                raise SyncError(f"version {version}: the copy in {shared} has digest {seen[:16]}, not {expected[:16]}")
            if final.exists():
                shutil.rmtree(final)
            os.rename(staging, final)
        except OSError as error:
            raise SyncError(f"version {version}: cannot write {final}: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        fsync_directory(shared)
        return final

    def _forget_old(self, shared: Path) -> None:
        versions = sorted(
            (int(match[1]), path) for path in shared.iterdir() if (match := _VERSION.fullmatch(path.name))
        )
        for _, path in versions[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
