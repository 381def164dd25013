"""Fetches one file of a listing with the Hub's own client: resumed by byte, checked, quarantined when it is wrong."""

import logging
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from k31core.checkpoint.hub_listing import DownloadError, HubUnreachableError, Listing, asked_wait_s
from k31core.checkpoint.verify_files import WORK_FOLDER, FileEntry, check_entries

_log = logging.getLogger(__name__)
_NETWORK_ATTEMPTS = 6
"""Tries of one file that end without new bytes; each that made progress starts the count again."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


class _Stopped(Exception):
    """Another file failed: this one is left where it is."""


def partial_path(directory: Path, entry: FileEntry) -> Path:
    """Where the bytes of `entry` gather; the name holds the digest that they are meant to have."""
    digest = entry.sha256 or entry.git_sha1 or "unknown"
    return directory / WORK_FOLDER / "partial" / f"{entry.path.replace('/', '--')}.{digest[:16]}"


class Fetcher:
    """Fetches files of one listing into one directory; used by several threads."""

    def __init__(self, listing: Listing, directory: Path, attempts: int) -> None:
        self.listing = listing
        self.directory = directory
        self.attempts = attempts
        self.stop = threading.Event()
        self.landed: set[str] = set()
        self.refetched: Counter[str] = Counter()
        (directory / WORK_FOLDER / "partial").mkdir(parents=True, exist_ok=True)

    def fetch(self, entry: FileEntry) -> FileEntry:
        """Brings a file into place and returns its checked entry.

        Raises DownloadError when it comes wrong `attempts` times or access is refused, HubUnreachableError when the
        Hub gives no more bytes.
        """
        partial = partial_path(self.directory, entry)
        for attempt in range(1, self.attempts + 1):
            self._gather(entry, partial)
            report = check_entries(partial.parent, [replace(entry, path=partial.name)], full=True, workers=1)
            if not report.problems:
                target = self.directory / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.replace(target)
                self.landed.add(entry.path)
                return replace(report.entries[0], path=entry.path)
            self.refetched[entry.path] += 1
            kept, detail = self.quarantine(partial, entry.path), report.problems[0].detail
            _log.warning("%s %s (try %d of %d); set aside: %s", entry.path, detail, attempt, self.attempts, kept)
        raise DownloadError(
            f"{self.listing.repo.repo_id}: {entry.path} came wrong {self.attempts} times ({detail}); the last one is "
            f"kept as {kept}. A proxy or mirror may be altering it: check HF_ENDPOINT, or fetch it another way and put "
            "it into the directory"
        )

    def quarantine(self, path: Path, name: str) -> Path:
        """Moves a wrong file aside, in place of an earlier one of that name."""
        target = self.directory / WORK_FOLDER / "quarantine" / name.replace("/", "--")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        return target

    def _gather(self, entry: FileEntry, partial: Path) -> None:
        """Gets the bytes that are missing, over as many connections as it takes while bytes keep coming."""
        failures, wait_s = 0, _FIRST_WAIT_S
        while not partial.is_file() or partial.stat().st_size < entry.size or entry.size == 0:
            before = partial.stat().st_size if partial.is_file() else 0
            error = self._one_connection(entry, partial)
            if error is None:
                return
            if partial.is_file() and partial.stat().st_size > before:
                failures, wait_s = 0, _FIRST_WAIT_S
            failures += 1
            if failures >= _NETWORK_ATTEMPTS:
                have = partial.stat().st_size if partial.is_file() else 0
                raise HubUnreachableError(
                    f"{self.listing.repo.repo_id}: {entry.path} stopped at {have} of {entry.size} bytes ({error}); "
                    "what is fetched stays, so run the same command again"
                ) from error
            pause_s = max(wait_s, error.wait_s) if isinstance(error, _HubBusy) else wait_s
            _log.info("%s: %s; next try in %.1f s", entry.path, error, pause_s)
            if self.stop.wait(pause_s):
                raise _Stopped
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _one_connection(self, entry: FileEntry, partial: Path) -> Exception | None:
        """One try; the network's error if it has one. Raises DownloadError for what no retry can help."""
        import httpx2
        from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError

        try:
            self._request(entry, partial)
        except GatedRepoError as error:
            raise DownloadError(
                f"{self.listing.repo.repo_id}: gated; accept its conditions on its page with your account, then log in "
                "with `hf auth login` or set HF_TOKEN"
            ) from error
        except EntryNotFoundError as error:
            raise DownloadError(
                f"{self.listing.repo.repo_id}: the Hub lists {entry.path} and does not have it"
            ) from error
        except HfHubHTTPError as error:
            if error.response.status_code in (401, 403):
                raise DownloadError(
                    f"{self.listing.repo.repo_id}: access to {entry.path} refused ({error.response.status_code}); "
                    "log in with `hf auth login` or set HF_TOKEN"
                ) from error
            if error.response.status_code == 416:
                partial.unlink(missing_ok=True)  # more bytes than the file has: start it again
            return _HubBusy(error.response.status_code, asked_wait_s(error.response.headers))
        except httpx2.HTTPError as error:
            return OSError(f"{type(error).__name__}: {error}")
        except OSError as error:
            if error.errno is not None:  # the disk's, not the client's "consistency check failed"
                raise DownloadError(
                    f"{partial}: cannot be written ({error}); free some space or choose another disk"
                ) from error
            return error
        return None

    def _request(self, entry: FileEntry, partial: Path) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get, is_xet_available, xet_get
        from huggingface_hub.utils import build_hf_headers

        repo = self.listing.repo
        url = hf_hub_url(
            repo.repo_id, entry.path, repo_type=repo.repo_type, revision=self.listing.commit, endpoint=repo.endpoint
        )
        headers = build_hf_headers(library_name="k31")
        metadata = get_hf_file_metadata(
            url, headers=headers, endpoint=repo.endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        expected = entry.sha256 or entry.git_sha1
        if metadata.etag not in (None, expected):
            raise OSError(f"the Hub offers etag {metadata.etag}, its listing says {expected}")
        if metadata.xet_file_data is not None and is_xet_available():
            xet_get(
                incomplete_path=partial,
                xet_file_data=metadata.xet_file_data,
                headers=headers,
                expected_size=entry.size,
                displayed_filename=entry.path,
                tqdm_class=_no_bar(),
            )
            return
        if metadata.location != url and not _same_host(metadata.location, url):
            headers.pop("authorization", None)  # a signed address elsewhere: the token stays here
        have = partial.stat().st_size if partial.is_file() else 0
        with partial.open("r+b" if have else "wb") as file:
            file.seek(have)
            http_get(
                metadata.location,
                _Stoppable(file, self.stop),
                resume_size=have,
                headers=headers,
                expected_size=entry.size,
                displayed_filename=entry.path,
                tqdm_class=_no_bar(),
            )


class _HubBusy(Exception):
    """The Hub answered with an error status, and for how long it asks to be left alone."""

    def __init__(self, status: int, wait_s: float) -> None:
        super().__init__(f"the Hub answers with {status}")
        self.wait_s = wait_s


class _Stoppable:
    """A file that refuses further bytes once the download is stopped."""

    def __init__(self, file: BinaryIO, stop: threading.Event) -> None:
        self._file = file
        self._stop = stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise _Stopped
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _same_host(one: str, other: str) -> bool:
    from urllib.parse import urlsplit

    return urlsplit(one).netloc == urlsplit(other).netloc


def _no_bar() -> type[Any]:
    """The Hub client's progress bar, switched off: progress is reported for all files together."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent
