"""The run directory: the one truth about a run. Torch-free; one writer, who holds the lock.

<save-dir>/<run-id>/
  recipe.json        resolved, frozen              ledger.jsonl    a line for each finished phase
  prompts.jsonl      each drawn prompt's end       metrics.jsonl   one object a step
  rollouts/step-N/   never regenerated             adapters/step-N/  what a resume starts from
  sync/step-N/       the adapter last published    report/         pictures, written at the end
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31core.checkpoint import commit as commits
from k31core.checkpoint.commit import CommitError
from k31core.checkpoint.lock import RunLock
from k31core.checkpoint.retention import remove_directories, steps_to_keep
from k31core.observe.jsonl import write_atomic
from k31core.observe.ledger import Ledger
from k31core.observe.metrics import MetricsFile
from k31core.observe.prompts import PromptLedger
from k31core.recipe.load import ResolvedRecipe, read_resolved, resolve
from k31core.recipe.recipe import Recipe
from k31core.recipe.run_changes import refuse_changes

RECIPE_FILE = "recipe.json"


class StoreError(ValueError):
    """A run directory that cannot be used: names the path, what was seen and what to do."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed adapter whose bytes were checked."""

    step: int
    directory: Path
    manifest: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """Step, policy version, data cursor, metrics and run id, as written at the save."""
        return dict(self.manifest["facts"])


@dataclass(frozen=True, slots=True)
class Search:
    """The newest valid commit, and the newer ones that had to be passed over."""

    commit: Commit | None
    rejected: tuple[tuple[Path, str], ...] = field(default=())
    """Directory and the reason, newest first."""


class RunStore:
    """A run directory opened for writing. Use as a context manager: it holds the lock."""

    def __init__(self, root: Path) -> None:
        """`root` must have been made by `create_run`. Raises StoreError, LockedError or JournalError."""
        self.root = root
        self.resolved: ResolvedRecipe = read_resolved(root / RECIPE_FILE)
        self._lock = RunLock(root / "lock")
        try:
            self._lock.acquire()
            self.ledger = Ledger(root / "ledger.jsonl")
            self.prompts = PromptLedger(root / "prompts.jsonl")
            self.metrics = MetricsFile(root / "metrics.jsonl")
            for name in ("rollouts", "adapters", "sync"):
                (root / name).mkdir(exist_ok=True)
                commits.remove_stale_staging(root / name)
        except OSError as error:
            self._lock.release()
            raise StoreError(f"cannot write the run directory {root}: {error.strerror}; make it writable") from error
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; idempotent."""
        self._lock.release()

    @property
    def notes(self) -> list[str]:
        """What was repaired when the run directory was opened."""
        return [note for note in (self.ledger.note, self.prompts.note, self.metrics.note) if note]

    @property
    def run_id(self) -> str:
        """The directory's name."""
        return self.root.name

    def rollout_dir(self, step: int) -> Path:
        """Where the samples of `step` are committed."""
        return self.root / "rollouts" / step_name(step)

    def adapter_dir(self, step: int) -> Path:
        """Where the save after `step` is committed."""
        return self.root / "adapters" / step_name(step)

    def sync_dir(self, step: int) -> Path:
        """Where the adapter published after `step` is committed."""
        return self.root / "sync" / step_name(step)

    def committed_rollout(self, step: int, policy_version: int) -> dict[str, Any] | None:
        """Manifest of a whole rollout of `step` drawn by `policy_version`; None when there is none.

        A rollout of another version or with damaged files is set aside, never trained on.
        """
        directory = self.rollout_dir(step)
        if not commits.is_committed(directory):
            return None
        try:
            manifest = commits.verify_directory(directory)
        except CommitError:
            commits.set_aside(directory, "bad")
            return None
        if manifest["facts"].get("policy_version") != policy_version:
            commits.set_aside(directory, "stale")
            return None
        return manifest

    def latest_valid_commit(self, *, at_most: int | None = None) -> Search:
        """The newest save whose every byte is as committed, trying older ones when newer ones are bad."""
        return latest_valid_commit(self.root, at_most=at_most)

    def save_adapter(self, staging: Path, step: int, facts: Mapping[str, Any]) -> Commit:
        """Commit a staged adapter as the save of `step`. Raises CommitError; the previous save is untouched."""
        facts = {**facts, "step": step, "run_id": self.run_id}
        manifest = commits.commit(staging, self.adapter_dir(step), kind="adapter", facts=facts)
        return Commit(step, self.adapter_dir(step), manifest)

    @contextmanager
    def save_staging(self, step: int) -> Iterator[Path]:
        """A staging directory for the save of `step`; pass it to `save_adapter` inside the block.

        Checks the free space first. On an error what was written is removed; a disk that filled up meanwhile or cannot
        be written is a CommitError that says how much is needed.
        """
        needed = self.require_space_for_save()
        staging: Path | None = None
        try:
            staging = commits.new_staging(self.adapter_dir(step))
            yield staging
        except Exception as error:
            fault = commits.disk_fault(error, self.adapter_dir(step), needed_bytes=needed)
            if fault is not None:
                raise fault from error
            raise
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)

    def apply_retention(self) -> list[Path]:
        """Delete what the recipe no longer keeps. The newest valid save and every rollout after it always stay."""
        save = self.resolved.recipe.save
        newest = self.latest_valid_commit().commit
        base = newest.step if newest else 0
        adapters = committed_steps(self.root / "adapters")
        keep = steps_to_keep(adapters, keep_last=save.keep_last, keep_every=save.keep_every, protected=[base])
        old_rollouts = [step for step in committed_steps(self.root / "rollouts") if step <= base]
        keep_rollouts = steps_to_keep(old_rollouts, keep_last=save.keep_rollouts, keep_every=0)
        synced = committed_steps(self.root / "sync")
        keep_sync = steps_to_keep(synced, keep_last=2, keep_every=0)
        return remove_directories(
            [self.adapter_dir(s) for s in adapters if s not in keep]
            + [self.rollout_dir(s) for s in old_rollouts if s not in keep_rollouts]
            + [self.sync_dir(s) for s in synced if s not in keep_sync]
        )

    def require_space_for_save(self) -> int:
        """Bytes that one more save needs, from the newest one. Raises CommitError when the disk cannot take it."""
        newest = self.latest_size("adapters") or self.latest_size("sync") * 4
        needed = int(newest * 1.1) + 16 * 1024**2
        commits.require_free_space(self.root, needed)
        return needed

    def latest_size(self, kind: str) -> int:
        """Bytes of the newest committed directory of `adapters`, `rollouts` or `sync`; 0 when there is none."""
        steps = committed_steps(self.root / kind)
        if not steps:
            return 0
        return sum(entry["size"] for entry in commits.read_manifest(self.root / kind / step_name(steps[-1]))["files"])


def step_name(step: int) -> str:
    """Directory name of a step: `step-00005`."""
    return f"step-{step:05d}"


def committed_steps(parent: Path) -> list[int]:
    """Steps with a committed directory under `parent`, ascending (by number, never by time)."""
    if not parent.is_dir():
        return []
    names = [path.name for path in parent.iterdir() if commits.is_committed(path)]
    return sorted(int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())


def latest_valid_commit(root: Path, *, at_most: int | None = None) -> Search:
    """The newest valid adapter save of the run at `root`, and the newer ones that are bad and why."""
    rejected: list[tuple[Path, str]] = []
    for step in reversed(committed_steps(root / "adapters")):
        directory = root / "adapters" / step_name(step)
        if at_most is not None and step > at_most:
            continue
        try:
            manifest = commits.verify_directory(directory)
            if manifest["facts"].get("run_id") != root.name or manifest["facts"].get("step") != step:
                raise CommitError(
                    f"{directory / commits.MANIFEST} belongs to run {manifest['facts'].get('run_id')!r} step "
                    f"{manifest['facts'].get('step')}: it was copied here; use train.lora.warm_start for that"
                )
            return Search(Commit(step, directory, manifest), tuple(rejected))
        except CommitError as error:
            rejected.append((directory, str(error)))
    return Search(None, tuple(rejected))


def create_run(save_dir: Path, run_id: str, resolved: ResolvedRecipe, *, must_exist: bool = False) -> Path:
    """Make the run directory, or check that the one that is there belongs to this recipe; returns its path.

    Raises StoreError for an unwritable place, RecipeError when the recipe differs in a field that a run cannot change.
    """
    root = save_dir / run_id
    if must_exist and not (root / RECIPE_FILE).is_file():
        known = ", ".join(run_ids(save_dir)[-5:]) or "none"
        raise StoreError(f"{root} is not a run directory (no {RECIPE_FILE}); runs in {save_dir}: {known}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "not writable", str(root))
        if (root / RECIPE_FILE).exists():
            accept_recipe(root, resolved.recipe)
            return root
        if any(root.iterdir()):
            raise StoreError(f"{root} is not empty and is not a run directory; give another --save-dir or --run-id")
        write_atomic(root / RECIPE_FILE, resolved.model_dump_json(indent=1).encode())
    except OSError as error:
        raise StoreError(
            f"cannot write the run directory {root}: {error.strerror}; choose another --save-dir"
        ) from error
    return root


def accept_recipe(root: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Compare with the frozen recipe; store allowed changes (the old file stays as `recipe-N.json`).

    Returns the changed fields. Raises RecipeError when one of them may not change.
    """
    old = read_resolved(root / RECIPE_FILE).recipe
    changed = refuse_changes(old, recipe, where=str(root))
    if not changed:
        return changed
    with RunLock(root / "lock"):
        number = len(list(root.glob("recipe-*.json"))) + 1
        write_atomic(root / f"recipe-{number}.json", (root / RECIPE_FILE).read_bytes())
        write_atomic(root / RECIPE_FILE, resolve(recipe).model_dump_json(indent=1).encode())
    return changed


def run_ids(save_dir: Path) -> list[str]:
    """Runs under `save_dir`, oldest first by the time of their recipe file."""
    found = list(save_dir.glob(f"*/{RECIPE_FILE}")) if save_dir.is_dir() else []
    return [path.parent.name for path in sorted(found, key=lambda p: (p.stat().st_mtime, p.parent.name))]


def newest_saved(save_dir: Path) -> str:
    """The newest run under `save_dir` with a save. Raises StoreError when there is none."""
    for run_id in reversed(run_ids(save_dir)):
        if committed_steps(save_dir / run_id / "adapters"):
            return run_id
    raise StoreError(f"no run in {save_dir} has a save; name a run (--save-dir says where runs are)")
