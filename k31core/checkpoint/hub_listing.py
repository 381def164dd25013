"""What a repository on the Hub holds at one commit: resolved revision, files, sizes and digests."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from k31core.checkpoint.verify_files import FileEntry, is_inside

RepoType = Literal["model", "dataset"]
COMMIT = re.compile(r"[0-9a-f]{40}")

MODEL_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "tokenizer*.txt",
    "vocab.txt",
    "merges.txt",
)
"""What training and serving read. Everything else of a model repository (pictures, other formats) stays there."""
DATASET_FILES = ("*.parquet", "*.jsonl")
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Between tries of the listing."""
_LONGEST_ASKED_WAIT_S = 300.0
CODE_FILES = ("*.py",)
"""Only with `include_code`: nothing of ours runs them, but tokenizers with `trust_remote_code` do."""


class DownloadError(ValueError):
    """Something to fix before a download can work: repository, revision, access, disk. Says what to do."""


class HubUnreachableError(RuntimeError):
    """The Hub does not answer, or answers with errors, after all retries: nothing to fix in the recipe."""


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository at a revision, as the user names it."""

    repo_id: str
    repo_type: RepoType = "model"
    revision: str | None = None
    """Branch, tag or commit; None is `main`."""
    endpoint: str | None = None
    """Another Hub than huggingface.co (HF_ENDPOINT)."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at a commit."""

    repo: Repo
    commit: str
    """40 hex digits: what the revision meant when it was asked."""
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files)


def list_repo(repo: Repo, *, include_code: bool = False) -> Listing:
    """Resolves the revision to a commit and lists the needed files at it.

    Raises DownloadError for a repository, revision or access that is not there, HubUnreachableError for a Hub that
    does not answer.
    """
    import httpx2
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.hf_api import RepoFile

    kind = "data set" if repo.repo_type == "dataset" else "model"
    login = "log in with `hf auth login` or set HF_TOKEN" if get_token() is None else "check what your token may read"
    try:
        commit, tree = _ask(repo)
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo.repo_id}: a gated {kind}; accept its conditions on its page with your account, then {login}"
        ) from error
    except RevisionNotFoundError as error:
        raise DownloadError(
            f"{repo.repo_id}: no revision {repo.revision!r}; use a branch, tag or full commit of that {kind}"
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"{repo.repo_id}: no such {kind}, or a private one; check the name, and {login} if it is private"
        ) from error
    except HFValidationError as error:
        raise DownloadError(f"{repo.repo_id}: not a repository name ({error}); use `owner/name`") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise DownloadError(f"{repo.repo_id}: access refused ({status}); {login}") from error
        raise HubUnreachableError(
            f"{repo.repo_id}: the Hub answers with {status} after all retries; try later"
        ) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise HubUnreachableError(
            f"{repo.repo_id}: the Hub cannot be reached ({error}); check the network or HF_ENDPOINT, or copy the files "
            "into the directory by hand: they are accepted after verification"
        ) from error
    found = [_entry(file, repo.repo_id) for file in tree if isinstance(file, RepoFile)]
    return Listing(repo, commit, tuple(_needed(found, repo, include_code)))


def _ask(repo: Repo) -> tuple[str, list[object]]:
    """(commit, files and folders), tried again while the Hub answers with 429 or 5xx, or drops the connection."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(endpoint=repo.endpoint)
    for wait_s in (*_WAITS_S, None):
        try:
            commit = api.repo_info(repo.repo_id, revision=repo.revision, repo_type=repo.repo_type).sha
            if commit is None or COMMIT.fullmatch(commit) is None:
                raise DownloadError(f"{repo.repo_id}: commit {commit!r} for {repo.revision}, expected 40 hex digits")
            tree = api.list_repo_tree(repo.repo_id, recursive=True, revision=commit, repo_type=repo.repo_type)
            return commit, list(tree)
        except HfHubHTTPError as error:
            if wait_s is None or (error.response.status_code != 429 and error.response.status_code < 500):
                raise
            wait_s = max(wait_s, asked_wait_s(error.response.headers))
        except (httpx2.TimeoutException, httpx2.RemoteProtocolError, httpx2.ReadError):
            if wait_s is None:
                raise
        time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def asked_wait_s(headers: Mapping[str, str]) -> float:
    """Seconds that an answer asks to wait (`Retry-After`), at most five minutes; 0 when it does not say.

    A date is not read: the Hub sends seconds, and a clock may be wrong.
    """
    text = headers.get("retry-after", "").strip()
    return min(float(text), _LONGEST_ASKED_WAIT_S) if text.isascii() and text.isdigit() else 0.0


def _entry(file: object, repo_id: str) -> FileEntry:
    path, size, lfs = str(file.path), int(file.size), file.lfs  # type: ignore[attr-defined]
    if not is_inside(path):
        raise DownloadError(f"{repo_id}: the file name {path!r} leads out of the directory: this repository is hostile")
    if lfs is not None:
        return FileEntry(path, int(lfs.size), sha256=str(lfs.sha256))
    return FileEntry(path, size, git_sha1=str(file.blob_id))  # type: ignore[attr-defined]


def _needed(entries: list[FileEntry], repo: Repo, include_code: bool) -> list[FileEntry]:
    patterns = (MODEL_FILES if repo.repo_type == "model" else DATASET_FILES) + (CODE_FILES if include_code else ())
    needed = [entry for entry in entries if any(fnmatch(entry.path.rsplit("/", 1)[-1], p) for p in patterns)]
    if not needed:
        raise DownloadError(
            f"{repo.repo_id}: none of its {len(entries)} files is needed here ({', '.join(patterns)}); is it the right "
            f"repository, and a {repo.repo_type} repository?"
        )
    return needed
