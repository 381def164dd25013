"""How task results are kept: small JSON manifests, keyed by content or by step, believed only while their files are."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, override

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.filesystems import LocalFileSystem

RESULTS_BLOCK = "k31-results"
STORAGE_NAME = f"verified-manifest-storage/{RESULTS_BLOCK}"


class StaleManifestError(ValueError):
    """A cached result whose files are gone or changed; the result store reads it as a miss and the task runs again."""


class VerifiedManifestStorage(LocalFileSystem):
    """Local result storage that checks the files of a manifest before it hands the manifest out.

    A manifest is a dict with `files: [{"path", "size", "sha256", "mtime_ns"}]`, paths absolute. Files whose size and
    time are unchanged are believed; a file with another time is hashed again.
    """

    _block_type_name = "Verified Manifest Storage"
    _block_type_slug = "verified-manifest-storage"

    @override
    async def aread_path(self, path: str) -> bytes:
        content: bytes = await super().aread_path(path)
        check_manifest(content)
        return content

    @override
    def read_path(self, path: str, _sync: bool = True) -> bytes:  # type: ignore[override]
        content: Any = super().read_path(path, _sync=True)  # type: ignore[call-arg]
        check_manifest(content)
        return bytes(content)


def check_manifest(content: bytes) -> None:
    """Raise StaleManifestError when a file of the stored result is missing, of another size or of another digest."""
    result = json.loads(json.loads(content)["result"])
    entries = result.get("files") if isinstance(result, dict) else None
    for entry in entries or []:
        path = Path(entry["path"])
        if not path.is_file():
            raise StaleManifestError(f"{path} is gone")
        state = path.stat()
        if state.st_size != entry["size"]:
            raise StaleManifestError(f"{path} has {state.st_size} bytes, its manifest says {entry['size']}")
        if state.st_mtime_ns != entry.get("mtime_ns") and _sha256(path) != entry["sha256"]:
            raise StaleManifestError(f"{path} has another digest than its manifest says")


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest entry of a file."""
    state = path.stat()
    return {"path": str(path), "size": state.st_size, "sha256": _sha256(path), "mtime_ns": state.st_mtime_ns}


def describe_files(directory: Path) -> list[dict[str, Any]]:
    """Manifest entries of every file under a directory."""
    return [describe_file(path) for path in sorted(directory.rglob("*")) if path.is_file()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_results_block(results: Path) -> None:
    """Tell the Prefect server about our result storage; flows name it as `STORAGE_NAME`. Needs the server."""
    results.mkdir(parents=True, exist_ok=True)
    VerifiedManifestStorage.register_type_and_schema()
    VerifiedManifestStorage(basepath=str(results)).save(RESULTS_BLOCK, overwrite=True)


@dataclass
class ContentKey(CachePolicy):
    """A key over the task's name, a version and some of its inputs: equal over flow runs, machines and restarts."""

    fields: tuple[str, ...] = field(default=())
    version: int = 1

    @override
    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        content = {name: inputs[name] for name in self.fields}
        return _key(task_ctx.task.name, {"version": self.version, **content})


@dataclass
class StepKey(CachePolicy):
    """A key over flow run, task name and some inputs: a retried flow run loads what it already did.

    Training changes an actor's memory, so its key holds the trainer's incarnation: a trainer that was restored must
    train again, and finds the committed rollouts.
    """

    fields: tuple[str, ...] = field(default=())
    version: int = 1

    @override
    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        content = {name: inputs[name] for name in self.fields}
        flow_run = str(task_ctx.task_run.flow_run_id)
        return _key(task_ctx.task.name, {"version": self.version, "flow_run": flow_run, **content})


def _key(task: str, content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    return f"k31-{task}-{digest[:32]}"
