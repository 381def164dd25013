"""What one flow run holds while it works on a run directory: the store, the recipe, the workers, where it stands."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from k31core.checkpoint.store import RunStore, create_run, run_ids
from k31core.cluster.actors import Worker, WorkerLostError, call_together
from k31core.cluster.hang import SilenceWatch
from k31core.cluster.home import Home, find_home
from k31core.observe.jsonl import read_lines
from k31core.observe.ledger import Attempt, Phase, has_ended, waits_for_a_person
from k31core.recipe.load import load_recipe, override_recipe, read_resolved, resolve
from k31core.recipe.recipe import Recipe

GIVES_SIGNS = ("train", "run", "evaluate")
"""Calls within which a worker writes what it has finished (`k31core.observe.progress`)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of the flow asked for."""

    recipe: str
    overrides: tuple[str, ...] = ()
    save_dir: str = "runs"
    run_id: str | None = None
    resume: bool = False
    num_rollout: int | None = None
    skip_saving: bool = False
    requested_by: str = "service"


@dataclass(slots=True)
class Prepared:
    """Where the prepared inputs lie."""

    model_dir: Path
    data_dir: Path


@dataclass(slots=True)
class Position:
    """Where the run stands; follows from the run directory and the workers' memory, never from Prefect."""

    trained: int = 0
    """Steps that the trainer's memory holds."""
    saved: int = 0
    """Step of the newest valid save."""
    cursor: Any = None
    """Data cursor after `trained` steps."""
    incarnation: str = ""
    """Changes whenever the trainer was restored or replaced."""

    def advance(self, step: int, cursor: Any) -> None:
        """The trainer's memory holds `step` now."""
        self.trained, self.cursor = step, cursor


class Run:
    """One flow run's hold on a run directory. A plain class: Prefect passes it to tasks as it is."""

    def __init__(self, store: RunStore, home: Home, request: Request) -> None:
        self.store = store
        self.home = home
        self.request = request
        self.recipe: Recipe = store.resolved.recipe
        self.prepared: Prepared | None = None
        self.trainers: list[Worker] = []
        self.engine: Worker | None = None
        self.worker_environment: dict[str, str] = {}
        """Variables that the survey of the cluster adds to every worker's environment."""
        self.position = Position()
        self.evaluates_only = False
        """True for `k31 eval`: it does not train, so ending it early says nothing about the run."""
        self.step_began: float | None = None
        """Monotonic time at which the step began that is not recorded yet; None between steps."""
        self._losses = 0
        self._loss_mark: list[int] = []
        self.flow_run_id = str(flow_run.get_id() or "local")
        self.sinks: list[Any] = []
        self.cleanup: list[Callable[[], object]] = []
        """Called once at the end, whatever happened."""
        self.save_if_idle: Callable[[Run], int | None] = lambda run: None
        """Saves the trainer's step on an interruption, when there is a trainer; returns the step it saved."""

    @property
    def last_step(self) -> int:
        """The run ends after this step."""
        return self.recipe.num_rollout

    @property
    def artifact_key(self) -> str:
        """The run's name as Prefect allows it in artifact keys."""
        return "".join(c if c.isascii() and (c.islower() or c.isdigit()) else "-" for c in self.store.run_id.lower())

    @property
    def resume_command(self) -> str:
        """What a person types to continue this run."""
        return f"k31 train --resume {self.store.run_id} --save-dir {self.store.root.parent}"

    def saves_at(self, step: int) -> bool:
        """Whether the adapter is to be saved after `step` and has not been."""
        save = self.recipe.save
        due = step > self.position.saved and (step % save.interval == 0 or step == self.last_step)
        return due and not save.skip_saving

    def is_open(self, step: int) -> bool:
        """Whether the metrics of `step` have still to be written: work was done in it since they last were."""
        if step == 0 and not self.evaluates_at(0):
            return False
        return self.step_began is not None or all(row["step"] != step for row in self.store.metrics.history)

    def evaluates_at(self, step: int) -> bool:
        """Whether the held-out set is evaluated after `step`: before the first, after the last, and at the interval."""
        if self.recipe.data.heldout is None:
            return False
        interval = self.recipe.eval.interval
        return step in (0, self.last_step) or (interval > 0 and step % interval == 0)

    def begin_step(self) -> None:
        """Start the step's clock."""
        self.step_began = time.monotonic()

    def count_loss(self, lost: WorkerLostError) -> None:
        """Count lost workers without progress in between; raises `lost` when the recipe's limit is reached."""
        mark = self.store.ledger.mark()
        self._losses = self._losses + 1 if mark == self._loss_mark else 1
        self._loss_mark = mark
        if self._losses > self.recipe.cluster.max_attempts_without_progress:
            raise lost

    def call_trainers(self, method: str, *arguments: Any) -> list[Any]:
        """The same call on every trainer rank at once; results by rank. Raises WorkerLostError or the rank's error."""
        timeout_s = self.recipe.cluster.phase_timeout_s
        return call_together(self.trainers, method, *arguments, timeout_s=timeout_s, watch=self._watch(method))

    def call_engine(self, method: str, *arguments: Any) -> Any:
        """A call on the rollout worker. Raises WorkerLostError or the worker's own error."""
        assert self.engine is not None, "connect() comes first"
        timeout_s = self.recipe.cluster.phase_timeout_s
        return self.engine.call(method, *arguments, timeout_s=timeout_s, watch=self._watch(method))

    def _watch(self, method: str) -> SilenceWatch | None:
        """For calls whose workers give signs of life; the others are short and have the phase's limit only."""
        limit_s = self.recipe.cluster.silence_timeout_s
        return SilenceWatch(self.store.root, method, limit_s) if method in GIVES_SIGNS else None

    @contextmanager
    def phase(self, phase: Phase, step: int, inputs: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Time a phase and write its ledger line when it ends without an error; fill the yielded outputs."""
        outputs: dict[str, Any] = {}
        began = time.monotonic()
        yield outputs
        self.store.ledger.append(phase, step, inputs=inputs, outputs=outputs, seconds=time.monotonic() - began)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            interrupted = isinstance(error, KeyboardInterrupt | TerminationSignal | SystemExit)
            if interrupted and not self.evaluates_only:
                self._commit_what_is_whole()
        finally:
            for close in reversed(self.cleanup):
                close()
            self.store.close()

    def _commit_what_is_whole(self) -> None:
        """Interrupted: save the trainer's step when it stands between two steps and has not been saved."""
        step = self.save_if_idle(self)
        self.store.ledger.append(Phase.INTERRUPTED, self.position.trained, outputs={"saved": step})
        where = f"saved after step {step}" if step else f"last save: step {self.position.saved}"
        print(f"interrupted; {where}. Continue with: {self.resume_command}", file=sys.stderr)


class NothingToResumeError(ValueError):
    """Every run has ended: not a fault."""


def open_run(request: Request) -> Run:
    """Open (or make) the run directory, take its lock and record this attempt.

    Raises RecipeError, StoreError, LockedError or JournalError; each says what to do.
    """
    home = find_home()
    save_dir = Path(request.save_dir).absolute()
    if request.run_id is None and request.resume:
        run_id = newest_unfinished(save_dir)
        if run_id is None:
            raise NothingToResumeError(f"nothing to resume in {save_dir}: no run there is unfinished")
    else:
        run_id = request.run_id or f"{request.recipe}-{str(flow_run.get_id() or 'local')[:8]}"
    root = save_dir / run_id
    if request.resume:
        recipe = resumed_recipe(root, request)
    else:
        recipe = load_recipe(request.recipe, request_overrides(request))
    root = create_run(save_dir, run_id, resolve(recipe), must_exist=request.resume)
    return Run(RunStore(root), home, request)


def begin_attempt(run: Run) -> str | None:
    """Record this flow run in the ledger. Returns why it must not go on, None when it may.

    Automatic attempts stop after `cluster.max_attempts_without_progress` that committed nothing new; a start by a
    person at the command line begins a new count.
    """
    ledger = run.store.ledger
    limit = run.recipe.cluster.max_attempts_without_progress
    by = "user" if run.request.requested_by == "user" and (flow_run.get_run_count() or 1) <= 1 else "service"
    futile = ledger.attempts_without_progress() if by == "service" else 0
    if futile >= limit:
        return (
            f"stopped: {futile} attempts in a row committed nothing new after step {ledger.last_step(Phase.TRAIN)}. "
            f"Look at the last error (`k31 status {run.store.run_id}`), then continue with: {run.resume_command}"
        )
    ledger.begin_attempt(Attempt(run.flow_run_id, flow_run.get_run_count() or 1, by))
    return None


def request_overrides(request: Request) -> list[str]:
    """The overrides of a request, its own options included."""
    overrides = list(request.overrides)
    if request.num_rollout is not None:
        overrides.append(f"num_rollout={request.num_rollout}")
    if request.skip_saving:
        overrides.append("save.skip_saving=true")
    return overrides


def resumed_recipe(root: Path, request: Request) -> Recipe:
    """The frozen recipe of the run with the request's overrides on top."""
    return override_recipe(read_resolved(root / "recipe.json").recipe, request_overrides(request))


def newest_unfinished(save_dir: Path) -> str | None:
    """The newest run that was neither finished nor ended by a person or the watchdog."""
    for run_id in reversed(run_ids(save_dir)):
        records, _ = read_lines(save_dir / run_id / "ledger.jsonl")
        if not has_ended(records) and not waits_for_a_person(records):
            return run_id
    return None
