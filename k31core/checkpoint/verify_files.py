"""Checks the files of a downloaded directory: sizes and digests, on all cores, as far as possible without a network.

`k31-files.json` is the directory's own manifest: repository, commit, and for each file its size, its digests and the
modification time at which they were last checked. A check is incremental (a file with the size and time of the
manifest is believed) or full. Directories without that manifest, copied by hand or made by `hf download`, are checked
against what they carry: the Hub's digests that `hf download` leaves beside the files, and the structure of the
checkpoint itself (every shard of the index there and as long as its header says).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

FILES_MANIFEST = "k31-files.json"
FORMAT = 1
WORK_FOLDER = ".k31-download"
"""Partial and quarantined files, inside the directory."""
_BLOCK = 1 << 20
"""Read and hashed at a time: what was read is still in the core's cache when it is hashed."""
_HIDDEN_FOLDERS = frozenset({WORK_FOLDER, ".cache", ".git"})

Progress = Callable[[int], None]
"""Told the bytes that were read since the last call."""


class FilesError(ValueError):
    """A directory that cannot be checked or does not hold what it should: names it and the next step."""


class Finding(StrEnum):
    """What is wrong with a file."""

    MISSING = "missing"
    SIZE = "size"
    DIGEST = "digest"
    STRUCTURE = "structure"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the manifest."""

    path: str
    """Relative to the directory, with `/`."""
    size: int
    sha256: str | None = None
    """Hex. Known from the Hub for LFS files, else from the first check."""
    git_sha1: str | None = None
    """Hex id of the git blob: what the Hub knows of small files."""
    mtime_ns: int | None = None
    """When the digests were last found right; None when they never were."""
    origin: str = "hub"
    """`hub`: digests are the Hub's; `local`: computed here from a file that nobody vouched for."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One file that is not as it should be."""

    path: str
    finding: Finding
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check."""

    entries: tuple[FileEntry, ...]
    """All files, with fresh modification times where they are right."""
    problems: tuple[Problem, ...]
    hashed_bytes: int
    believed_files: int
    """Files whose size and time were those of the manifest."""
    unvouched_files: int
    """Files without a digest from the Hub: their digests were computed here."""


def read_manifest(directory: Path) -> tuple[dict[str, Any], list[FileEntry]] | None:
    """(facts, entries) of the manifest, None without one. Raises FilesError when it is damaged."""
    file = directory / FILES_MANIFEST
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        entries = [FileEntry(**entry) for entry in content.pop("files")]
        if content["format"] != FORMAT or not all(is_inside(entry.path) for entry in entries):
            raise ValueError(f"format {content['format']}, expected {FORMAT}, and paths inside the directory")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FilesError(
            f"{file}: not a manifest of ours ({error}); remove it and verify again, which starts a new one"
        ) from error
    return content, entries


def write_manifest(directory: Path, facts: Mapping[str, Any], entries: Iterable[FileEntry]) -> None:
    """Replaces the manifest in one step."""
    files = [asdict(entry) for entry in sorted(entries, key=lambda entry: entry.path)]
    content = {**facts, "format": FORMAT, "files": files}
    staged = directory / f".{FILES_MANIFEST}.{os.getpid()}"
    staged.write_text(json.dumps(content, indent=1) + "\n")
    staged.replace(directory / FILES_MANIFEST)


def check_entries(
    directory: Path,
    entries: Iterable[FileEntry],
    *,
    full: bool,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Checks every entry; `workers` threads, the largest files first.

    By default two threads a core: while one waits for the disk the other hashes.
    """
    ordered = sorted(entries, key=lambda entry: -entry.size)
    with ThreadPoolExecutor(max_workers=workers or 2 * (os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda entry: _check(directory, entry, full, progress or _ignore), ordered))
    return Report(
        entries=tuple(sorted((entry for entry, _, _ in results), key=lambda entry: entry.path)),
        problems=tuple(sorted((p for _, p, _ in results if p is not None), key=lambda problem: problem.path)),
        hashed_bytes=sum(hashed for _, _, hashed in results),
        believed_files=sum(problem is None and not hashed for _, problem, hashed in results),
        unvouched_files=sum(entry.origin == "local" for entry, _, _ in results),
    )


def _check(directory: Path, entry: FileEntry, full: bool, progress: Progress) -> tuple[FileEntry, Problem | None, int]:
    """(entry, problem, bytes hashed) of one file."""
    path = directory / entry.path
    unchecked = replace(entry, mtime_ns=None)
    try:
        state = path.stat()
    except OSError:
        return unchecked, Problem(entry.path, Finding.MISSING, "is not there"), 0
    if state.st_size != entry.size:
        detail = f"has {state.st_size} bytes, expected {entry.size}"
        return unchecked, Problem(entry.path, Finding.SIZE, detail), 0
    if not full and state.st_mtime_ns == entry.mtime_ns:
        progress(entry.size)
        return entry, None, 0
    try:
        sha256, git_sha1 = digests(path, entry.size, want_git=entry.git_sha1 is not None, progress=progress)
    except OSError as error:
        return unchecked, Problem(entry.path, Finding.UNREADABLE, f"cannot be read ({error})"), 0
    for name, expected, found in (("sha256", entry.sha256, sha256), ("git sha1", entry.git_sha1, git_sha1)):
        if expected is not None and found != expected:
            detail = f"has {name} {found}, expected {expected}"
            return unchecked, Problem(entry.path, Finding.DIGEST, detail), entry.size
    return replace(entry, sha256=sha256, mtime_ns=state.st_mtime_ns), None, entry.size


def digests(path: Path, size: int, *, want_git: bool, progress: Progress | None = None) -> tuple[str, str | None]:
    """(SHA-256, git blob id if wanted) of a file, read once. Hashing runs outside the interpreter's lock."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if want_git else None
    buffer = bytearray(min(_BLOCK, max(size, 1)))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        # Larger read-ahead. Not WILLNEED for the next blocks: that fills the page cache with single pages, from which
        # a file is copied at a third of the speed, now and at every later check.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            sha256.update(view[:count])
            if git is not None:
                git.update(view[:count])
            if progress is not None:
                progress(count)
    return sha256.hexdigest(), git.hexdigest() if git is not None else None


def entries_found(directory: Path) -> list[FileEntry]:
    """Entries for the files of a directory without a manifest, with the digests that `hf download` left if it did.

    Raises FilesError when there is nothing to check.
    """
    if not directory.is_dir():
        raise FilesError(f"{directory}: no such directory")
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and path.name != FILES_MANIFEST
        and not _HIDDEN_FOLDERS.intersection(path.relative_to(directory).parts)
    ]
    if not files:
        raise FilesError(f"{directory}: holds no files; download the checkpoint into it or name another directory")
    return [_found(directory, path) for path in files]


def _found(directory: Path, path: Path) -> FileEntry:
    relative = path.relative_to(directory).as_posix()
    etag = _etag_of_hf_download(directory, relative)
    return FileEntry(
        path=relative,
        size=path.stat().st_size,
        sha256=etag if etag and len(etag) == 64 else None,
        git_sha1=etag if etag and len(etag) == 40 else None,
        origin="hub" if etag else "local",
    )


def _etag_of_hf_download(directory: Path, relative: str) -> str | None:
    """The Hub's digest that `hf download` keeps: second line of `.cache/huggingface/download/*.metadata`."""
    file = directory / ".cache" / "huggingface" / "download" / f"{relative}.metadata"
    try:
        lines = file.read_text().split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    etag = lines[1].strip() if len(lines) > 1 else ""
    return etag if len(etag) in (40, 64) and all(c in "0123456789abcdef" for c in etag) else None


def structure_problems(directory: Path) -> list[Problem]:
    """What a checkpoint's own files say about each other: index and shards, headers and lengths, readable JSON."""
    problems = []
    for path in sorted(directory.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            problems.append(Problem(path.name, Finding.STRUCTURE, f"is not JSON ({error})"))
    for path in sorted(directory.glob("*.safetensors")):
        detail = _header_problem(path)
        if detail:
            problems.append(Problem(path.name, Finding.STRUCTURE, detail))
    for index in sorted(directory.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(Problem(index.name, Finding.STRUCTURE, "has no `weight_map`"))
            continue
        missing = sorted(str(shard) for shard in shards if not (directory / str(shard)).is_file())
        problems += [Problem(shard, Finding.MISSING, f"is named by {index.name} and is not there") for shard in missing]
    return problems


def _header_problem(path: Path) -> str | None:
    """What is wrong with the layout of a safetensors file, if anything."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > 100_000_000:
            return f"has {size} bytes, too few for its header of {length}"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "has a header that is not a safetensors header"
    if 8 + length + end != size:
        return f"has {size} bytes, its header describes {8 + length + end}"
    return None


def is_inside(path: str) -> bool:
    return (
        bool(path)
        and not path.startswith("/")
        and ".." not in path.split("/")
        and "\\" not in path
        and "\0" not in path
    )


def _ignore(_: int) -> None:
    """Progress that nobody wants."""
