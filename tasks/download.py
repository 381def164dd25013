"""Stage prepare, downloads: checkpoints and data sets from the Hub, each byte checked, as JSON manifests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.checkpoint.download import Downloaded, Notify, Transfer, download_repo
from k31core.checkpoint.hub_listing import HubUnreachableError, Repo
from k31core.recipe.model import ModelRecipe

_SECONDS_BETWEEN_LINES = 15.0


def _hub_is_away(_task: Any, _run: Any, state: Any) -> bool:
    """Retry condition: only a Hub that does not answer gets better by waiting."""
    return isinstance(state.data, HubUnreachableError)


@task(
    name="download-model",
    task_run_name="download-model",
    # No result cache: the directory's own manifest is the record, and looking again costs a listing and file times.
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=[30, 120, 600],
    retry_condition_fn=_hub_is_away,
)
def download_model(model: dict[str, Any], models_dir: str) -> dict[str, Any]:
    """The checkpoint of a recipe's `model` section (as JSON) under `models_dir/<name>`.

    Returns `{"directory", "commit", "offline", "files": [{"path", "size", "sha256", "mtime_ns"}]}` with absolute paths.
    Raises DownloadError (something to fix) or HubUnreachableError (retried).
    """
    log = get_run_logger()
    return fetch_model(ModelRecipe.model_validate(model), Path(models_dir), log_progress(log.info))


def fetch_model(model: ModelRecipe, models_dir: Path, notify: Notify | None = None) -> dict[str, Any]:
    """What the task does, for callers without Prefect. Python files come only with `trust_remote_code`."""
    repo = Repo(str(model.repo), "model", model.revision)
    done = download_repo(repo, models_dir / model.name, include_code=model.trust_remote_code, notify=notify)
    return manifest_of(done)


def download_dataset_files(repo_id: str, revision: str | None, directory: Path, log: Callable[[str], Any]) -> Path:
    """The folder with a Hub data set's files; part of the task that prepares them (`tasks.dataset`)."""
    done = download_repo(Repo(repo_id, "dataset", revision), directory, notify=log_progress(log))
    return done.directory


def manifest_of(done: Downloaded) -> dict[str, Any]:
    """The task result: small JSON that names every file."""
    files = [
        {"path": str(done.directory / e.path), "size": e.size, "sha256": e.sha256, "mtime_ns": e.mtime_ns}
        for e in done.entries
    ]
    return {
        "directory": str(done.directory),
        "commit": done.commit,
        "offline": done.offline,
        "fetched_files": done.fetched_files,
        "kept_files": done.kept_files,
        "refetched": done.refetched,
        "files": files,
    }


def log_progress(write: Callable[[str], Any]) -> Notify:
    """Writes a line with bytes, rate and time left every quarter of a minute."""
    last = time.monotonic()

    def notify(transfer: Transfer) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            write(describe_transfer(transfer))

    return notify


def describe_transfer(transfer: Transfer) -> str:
    """`12.3 of 1400.0 GB, 3 of 96 files, 850 MB/s, 27 min left`."""
    left = "unknown time" if transfer.eta_s is None else f"{transfer.eta_s / 60:.0f} min"
    return (
        f"{transfer.done_bytes / 1e9:.1f} of {transfer.total_bytes / 1e9:.1f} GB, {transfer.files_done} of "
        f"{transfer.files} files, {transfer.rate / 1e6:.0f} MB/s, {left} left"
    )
