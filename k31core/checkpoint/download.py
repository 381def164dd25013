"""Downloads a repository of the Hub into a directory: pinned, resumable, parallel, every byte checked.

    list_repo ──► files already there and right? ──► kept
                        │ no
                        ▼
                  partial file ◄── resumed by byte ──► digest right? ──► renamed into place
                                                          │ no
                                                          ▼
                                             quarantine, fetched again (a bounded number of times)

Work in progress lies in `.k31-download/` inside the directory: partial files carry the digest they are meant to have,
so a file that changes on the Hub never continues an old one. The manifest `k31-files.json` is written at the end.
Without a network, a directory that holds a checkpoint already is accepted after verification.
"""

import fcntl
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31core.checkpoint.download_file import Fetcher, partial_path
from k31core.checkpoint.hub_listing import DownloadError, HubUnreachableError, Listing, Repo, list_repo
from k31core.checkpoint.verify_files import (
    WORK_FOLDER,
    FileEntry,
    check_entries,
    entries_found,
    read_manifest,
    structure_problems,
    write_manifest,
)

_HEADROOM = 64 << 20
"""Bytes that stay free on the disk."""

Notify = Callable[["Transfer"], None]


@dataclass(slots=True)
class Transfer:
    """How far a download is; `notify` gets it about twice a second."""

    total_bytes: int = 0
    done_bytes: int = 0
    """Of all files: kept, fetched, or so far in partial files."""
    fetched_bytes: int = 0
    """Over the network in this download."""
    files: int = 0
    files_done: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second over the network."""
        return self.fetched_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this rate; None without one."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A directory that holds what it should."""

    directory: Path
    commit: str | None
    """None for files accepted without the Hub."""
    entries: tuple[FileEntry, ...]
    kept_files: int
    fetched_files: int
    refetched: dict[str, int] = field(default_factory=dict)
    """Files that came wrong: how often."""
    offline: bool = False


def download_repo(
    repo: Repo,
    directory: Path,
    *,
    include_code: bool = False,
    workers: int = 8,
    attempts: int = 3,
    notify: Notify | None = None,
) -> Downloaded:
    """Makes `directory` hold the needed files of `repo`, each with the Hub's size and digest.

    `attempts` bounds the times that a file which comes wrong is fetched. Raises DownloadError (something to fix) or
    HubUnreachableError; what is already fetched stays for the next try.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        try:
            listing = list_repo(repo, include_code=include_code)
        except HubUnreachableError as error:
            return _accept_without_hub(repo, directory, error)
        return _download(listing, directory, workers, attempts, notify)


def _download(listing: Listing, directory: Path, workers: int, attempts: int, notify: Notify | None) -> Downloaded:
    known = read_manifest(directory)
    times = {entry.path: entry for entry in known[1]} if known else {}
    report = check_entries(directory, [_with_time(entry, times) for entry in listing.files], full=False)
    right = {entry.path: entry for entry in report.entries if entry.mtime_ns is not None}
    missing = [entry for entry in listing.files if entry.path not in right]
    fetcher = Fetcher(listing, directory, attempts)
    for problem in report.problems:
        if (directory / problem.path).exists():
            fetcher.quarantine(directory / problem.path, problem.path)
    _check_space(directory, missing)
    transfer = Transfer(listing.total_bytes, files=len(listing.files))
    with _reporting(transfer, fetcher, right.values(), missing, notify):
        fetched = _fetch_all(fetcher, missing, workers)
    entries = (*right.values(), *fetched)
    facts = {
        "repo": listing.repo.repo_id,
        "repo_type": listing.repo.repo_type,
        "revision": listing.repo.revision or "main",
        "commit": listing.commit,
    }
    write_manifest(directory, facts, entries)
    return Downloaded(directory, listing.commit, entries, len(right), len(fetched), dict(fetcher.refetched))


def _with_time(entry: FileEntry, times: dict[str, FileEntry]) -> FileEntry:
    """The Hub's entry with the time of the last check, if it was a check of the same digests."""
    before = times.get(entry.path)
    if before is None or before.size != entry.size:
        return entry
    same = (entry.sha256 or before.sha256) == before.sha256 and (entry.git_sha1 or before.git_sha1) == before.git_sha1
    if not same:
        return entry
    return FileEntry(entry.path, entry.size, before.sha256, entry.git_sha1, before.mtime_ns)


def _fetch_all(fetcher: Fetcher, missing: list[FileEntry], workers: int) -> list[FileEntry]:
    """Fetches every file, the largest first; the first failure stops the others at their next block and is raised."""
    with ThreadPoolExecutor(max_workers=workers) as pool:
        tasks = [pool.submit(fetcher.fetch, entry) for entry in sorted(missing, key=lambda entry: -entry.size)]
        try:
            finished, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in finished:
                task.result()
        except BaseException:
            fetcher.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [task.result() for task in tasks]


def _accept_without_hub(repo: Repo, directory: Path, error: HubUnreachableError) -> Downloaded:
    """What is in the directory, when it is whole by everything that can be checked here; else the network's error."""
    known = read_manifest(directory)
    try:
        entries = known[1] if known else entries_found(directory)
    except ValueError:
        raise error from None
    report = check_entries(directory, entries, full=False)
    problems = [*report.problems, *structure_problems(directory)]
    usable = any(entry.path.endswith((".safetensors", ".parquet", ".jsonl")) for entry in entries)
    if problems or not usable:
        detail = "; ".join(f"{problem.path} {problem.detail}" for problem in problems[:5]) or "no data in it"
        raise HubUnreachableError(f"{error}. What is in {directory} is not whole: {detail}") from error
    facts = known[0] if known else {"repo": repo.repo_id, "repo_type": repo.repo_type, "revision": None, "commit": None}
    _check_revision(repo, facts, directory)
    write_manifest(directory, facts, report.entries)
    return Downloaded(directory, facts.get("commit"), report.entries, len(report.entries), 0, offline=True)


def _check_revision(repo: Repo, facts: dict[str, Any], directory: Path) -> None:
    commit, wanted = facts.get("commit"), repo.revision
    if commit and wanted and len(wanted) == 40 and wanted != commit:
        raise DownloadError(
            f"{directory} holds commit {commit} of {facts.get('repo')}, the recipe asks for {wanted}, and the Hub "
            "cannot be reached: change the revision or wait for the network"
        )


def _check_space(directory: Path, missing: list[FileEntry]) -> None:
    have = sum(_size(partial_path(directory, entry)) for entry in missing)
    need = sum(entry.size for entry in missing) - have
    free = shutil.disk_usage(directory).free
    if need + _HEADROOM > free:
        raise DownloadError(
            f"{directory}: {need / 1e9:.1f} GB are still to be fetched and the disk has {free / 1e9:.1f} GB free; free "
            "some, or set K31_MODEL_DIR (K31_DATA_DIR for data) to another disk"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """One download at a time into a directory."""
    work = directory / WORK_FOLDER
    work.mkdir(exist_ok=True)
    with (work / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DownloadError(f"{directory}: another process downloads into it; wait for it or stop it") from error
        yield


@contextmanager
def _reporting(
    transfer: Transfer, fetcher: Fetcher, kept: Any, missing: list[FileEntry], notify: Notify | None
) -> Iterator[None]:
    """Tells `notify` how far the partial files are while the block runs."""
    kept_bytes = sum(entry.size for entry in kept)
    started_with = sum(_size(partial_path(fetcher.directory, entry)) for entry in missing)
    done = threading.Event()

    def look(seconds: float) -> None:
        landed = [entry for entry in missing if entry.path in fetcher.landed]
        partial = sum(_size(partial_path(fetcher.directory, e)) for e in missing if e.path not in fetcher.landed)
        in_place = sum(entry.size for entry in landed) + partial
        transfer.done_bytes = min(kept_bytes + in_place, transfer.total_bytes)
        transfer.fetched_bytes = max(transfer.fetched_bytes, in_place - started_with)
        transfer.files_done = transfer.files - len(missing) + len(landed)
        transfer.seconds += seconds
        if notify is not None:
            notify(transfer)

    def watch() -> None:
        while not done.wait(0.5):
            look(0.5)

    thread = threading.Thread(target=watch, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look(0.0)
