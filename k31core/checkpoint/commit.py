"""Atomic directories: write beside, fsync, manifest with sizes and digests, finite check, rename.

Nothing half-written is ever picked up: a directory counts only when its `manifest.json` is there and every file
matches it. After a kill the temporary directory stays behind and the next open removes it; on a full or read-only disk
it is removed at once, and the error says what is needed.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k31core.checkpoint.finite import TensorFileError, check_finite
from k31core.observe.jsonl import fsync_directory

MANIFEST = "manifest.json"
FORMAT = 1
_STAGING = ".staging-"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


class CommitError(ValueError):
    """A committed directory that cannot be used, or a commit that could not be made: names file and next step."""


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_committed(directory: Path) -> bool:
    """True when `directory` was committed (its bytes are not checked here)."""
    return (directory / MANIFEST).is_file()


@contextmanager
def staged(final: Path, kind: str, facts: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """A directory to write into; when the block ends without an error it is committed as `final`.

    `facts` (JSON values) go into the manifest; a mutable mapping may be filled inside the block. On an error the
    staged files are removed and `final` is untouched; a disk that is full or cannot be written is a CommitError.
    """
    staging: Path | None = None
    try:
        staging = new_staging(final)
        yield staging
        commit(staging, final, kind=kind, facts=facts or {})
    except BaseException as error:
        written = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file()) if staging else 0
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        fault = disk_fault(error, final, needed_bytes=written)
        if fault is not None:
            raise fault from error
        raise


def disk_fault(error: BaseException, final: Path, *, needed_bytes: int = 0) -> CommitError | None:
    """The error to show when the disk under `final` is full or cannot be written; None for any other fault.

    Says what the commit needs: `needed_bytes`, or what its neighbours take when that is more.
    """
    number = _errno(error)
    if number not in (*_FULL, *_CLOSED):
        return None
    where = next(parent for parent in final.parents if parent.is_dir())
    if number in _CLOSED:
        return CommitError(
            f"{final} cannot be written ({os.strerror(number)}): make {where} writable and continue the run; nothing "
            f"was changed, what was committed before is intact"
        )
    needed, free = max(needed_bytes, *_sizes(where)), shutil.disk_usage(where).free
    return CommitError(
        f"the disk of {where} filled up while {final.name} was written: it needs about {_mib(needed)}, {_mib(free)} "
        f"are free now. Nothing is lost, what was committed before is intact; free some space and continue the run"
    )


def _errno(error: BaseException) -> int:
    """The operating system's number of an error; 0 when it has none. safetensors' Rust part gives it in words."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    return int(found[1]) if found else 0


def _sizes(parent: Path) -> list[int]:
    """Bytes of the commits beside, as their manifests say."""
    sizes = [0]
    for directory in parent.iterdir():
        if is_committed(directory):
            try:
                sizes.append(sum(entry["size"] for entry in read_manifest(directory)["files"]))
            except CommitError:
                continue  # a damaged neighbour does not matter here
    return sizes


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"


def new_staging(final: Path) -> Path:
    """An empty directory beside `final`, on the same file system."""
    staging = final.parent / f"{_STAGING}{final.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    staging.mkdir(parents=True)
    return staging


def commit(staging: Path, final: Path, *, kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a fully written staging directory into `final`; returns the manifest.

    A committed `final` with the same files is kept as it is (the commit is idempotent); one that differs or is
    damaged is set aside as `<name>.replaced-N`, never deleted. Raises CommitError for a file that is not finite.
    """
    files = [
        _describe(path, staging) for path in sorted(staging.rglob("*")) if path.is_file() and path.name != MANIFEST
    ]
    if not files:
        raise CommitError(f"nothing was written into {staging}: refusing to commit an empty {kind} as {final.name}")
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "facts": dict(facts),
        "facts_digest": _facts_digest(facts),
        "files": files,
        "digest": digest_of(files),
    }
    if is_committed(final) and _same_files(final, manifest):
        shutil.rmtree(staging)
        return read_manifest(final)
    path = staging / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    for directory in [p for p in staging.rglob("*") if p.is_dir()] + [staging]:
        fsync_directory(directory)
    if final.exists():
        set_aside(final, "replaced")
    os.rename(staging, final)
    fsync_directory(final.parent)
    return manifest


def set_aside(directory: Path, why: str) -> Path:
    """Rename `directory` to `<name>.<why>-N` so that it is no longer picked up; its bytes stay for inspection."""
    number = 1
    while (target := directory.with_name(f"{directory.name}.{why}-{number}")).exists():
        number += 1
    os.rename(directory, target)
    fsync_directory(directory.parent)
    return target


def _describe(path: Path, root: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    if path.suffix == ".safetensors":
        check_finite(path)
    return {"path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "sha256": sha256_file(path)}


def digest_of(files: list[dict[str, Any]]) -> str:
    """One digest over names, sizes and contents: two directories with equal digests hold the same bytes."""
    lines = sorted(f"{entry['path']}\t{entry['size']}\t{entry['sha256']}\n" for entry in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _facts_digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _same_files(final: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        return bool(verify_directory(final)["digest"] == manifest["digest"])
    except CommitError:
        return False


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a committed directory. Raises CommitError when it is missing, damaged or of another format."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise CommitError(f"{path} has format {manifest['format']}, this version reads {FORMAT}")
        same = manifest["digest"] == digest_of(manifest["files"])
        if not same or manifest["facts_digest"] != _facts_digest(manifest["facts"]):
            raise CommitError(f"{path} does not match its own digest: it was changed after the commit")
    except FileNotFoundError as error:
        raise CommitError(f"{path} is missing: {directory} was never committed") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CommitError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return dict(manifest)


def verify_directory(directory: Path, *, finite: bool = True) -> dict[str, Any]:
    """Check every file of a committed directory against its manifest; returns the manifest.

    Raises CommitError naming the first file that is missing, extra, of another size, of another digest or not finite.
    """
    manifest = read_manifest(directory)
    listed = {entry["path"]: entry for entry in manifest["files"]}
    found = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()} - {MANIFEST}
    for name in sorted(listed.keys() - found):
        raise CommitError(f"{directory / name} is missing; the manifest lists it with {listed[name]['size']} bytes")
    for name in sorted(found - listed.keys()):
        raise CommitError(f"{directory / name} is not in the manifest: a stranger's file, move it away")
    for name, entry in sorted(listed.items()):
        path = directory / name
        if path.stat().st_size != entry["size"]:
            raise CommitError(f"{path} has {path.stat().st_size} bytes, the manifest says {entry['size']}: truncated")
        if sha256_file(path) != entry["sha256"]:
            raise CommitError(f"{path} has another digest than the manifest: its bytes changed after the commit")
        if finite and path.suffix == ".safetensors":
            try:
                check_finite(path)
            except TensorFileError as error:
                raise CommitError(str(error)) from error
    return manifest


def remove_stale_staging(parent: Path) -> list[Path]:
    """Remove what killed writers left behind. Only for the holder of the run's lock."""
    stale = [path for path in parent.glob(f"{_STAGING}*") if path.is_dir()] if parent.is_dir() else []
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def require_free_space(directory: Path, needed_bytes: int) -> None:
    """Raise CommitError, before anything is written, when the file system has too little room."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise CommitError(
            f"{directory} has {_mib(free)} free, the save needs {_mib(needed_bytes)}: free some space or move the run; "
            f"nothing was written, the last commit is intact"
        )
