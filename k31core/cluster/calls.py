"""Waiting for calls on actors: the results, or the one error that tells most.

Ranks of one process group depend on each other: when one dies or fails alone, the others wait for it inside a
collective, for as long as the group's timeout. So nobody here waits for all: the first failure ends the wait.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

Watch = Callable[[], None]
"""Looks at what the calls themselves do not show; raises ClusterError when waiting on has no sense."""
WATCH_S = 1.0
"""Between two looks."""
GRACE_S = 10.0
"""Time for the other ranks to end (usually with the same error) after one has raised. A dead rank gets them none."""
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OutOfMemoryError)
_PEER_WORDS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error")
_PEER_TYPES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})


class ClusterError(RuntimeError):
    """Ray could not give what the recipe asks for, or an actor did not start: says what there is."""


class WorkerLostError(ClusterError):
    """An actor died or did not answer in time; the run resumes from its last commit with a new one."""


@dataclass(slots=True)
class Outcomes:
    """What came of some calls, by their index."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    """The worker's own errors."""
    dead: dict[int, str] = field(default_factory=dict)
    """Calls whose actor is gone, with Ray's reason."""
    unfinished: list[int] = field(default_factory=list)
    watched: ClusterError | None = None
    """What the watch said, which ended the wait."""

    @property
    def whole(self) -> bool:
        """Every call returned."""
        return not (self.errors or self.dead or self.unfinished)

    @property
    def broken(self) -> bool:
        """A process group over these workers is of no further use."""
        lost_peer = any(is_lost_peer(error) for error in self.errors.values())
        return bool(self.dead or self.unfinished or lost_peer)


def collect(
    calls: Sequence[ray.ObjectRef], *, timeout_s: float, grace_s: float = 0.0, watch: Watch | None = None
) -> Outcomes:
    """Wait until all calls have ended, the time is up, one's actor is gone, or `grace_s` after the first error.

    watch: asked every `WATCH_S` seconds while nothing ends; its ClusterError ends the wait.
    """
    found = Outcomes()
    index = {call: number for number, call in enumerate(calls)}
    pending, deadline = list(calls), time.monotonic() + timeout_s
    try:
        while pending:
            left = max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, WATCH_S) if watch else left)
            if not ready and watch and left > WATCH_S:
                try:
                    watch()
                except ClusterError as said:
                    found.watched = said
                    break
                continue
            if not ready:
                break
            _take(found, index[ready[0]], ready[0])
            if found.dead:
                deadline = 0.0
            elif found.errors:
                deadline = min(deadline, time.monotonic() + grace_s)
    except SystemError as error:  # a signal's exception (a cancel) that was raised inside Ray's C code comes wrapped
        raise error.__cause__ or error from None
    found.unfinished = sorted(index[call] for call in pending)
    return found


def _take(found: Outcomes, number: int, call: ray.ObjectRef) -> None:
    try:
        found.results[number] = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        found.errors[number] = error.cause or error
    except _LOST as error:
        found.dead[number] = first_line(error)


def failure(found: Outcomes, names: Sequence[str], method: str, timeout_s: float) -> BaseException:
    """The error to raise for outcomes that are not whole.

    A dead worker before everything, since the others' errors may be its consequence; then a worker's own error, the
    operating system's first (the caller reads its number); then a lost connection; then silence.
    """
    if found.watched is not None and not found.dead:
        return found.watched
    if found.dead:
        number = min(found.dead)
        rest = f" ({len(found.dead)} of {len(names)} are gone)" if len(found.dead) > 1 else ""
        return WorkerLostError(f"{names[number]}: the process died during `{method}`{rest}: {found.dead[number]}")
    own = {number: error for number, error in found.errors.items() if not is_lost_peer(error)}
    if own:
        return own[min(own, key=lambda number: (not isinstance(own[number], OSError), number))]
    if found.errors:
        number = min(found.errors)
        return WorkerLostError(
            f"{names[number]}: lost another rank during `{method}`: {first_line(found.errors[number])}"
        )
    silent = ", ".join(names[number] for number in found.unfinished)
    return WorkerLostError(
        f"{silent}: `{method}` has not ended after {timeout_s:.0f} s (cluster.phase_timeout_s): taken for hung"
    )


def wait_for(
    names: Sequence[str],
    calls: Sequence[ray.ObjectRef],
    method: str,
    timeout_s: float,
    watch: Watch | None = None,
) -> list[Any]:
    """Results of independent calls, in order; the first failure is raised at once. A lost worker is WorkerLostError,
    the worker's own error is raised as it is."""
    found = collect(calls, timeout_s=timeout_s, watch=watch)
    if not found.whole:
        raise failure(found, names, method, timeout_s)
    return [found.results[number] for number in range(len(calls))]


def is_lost_peer(error: BaseException) -> bool:
    """Whether a rank's error says that another rank is gone, and nothing about itself."""
    if _PEER_TYPES & {kind.__name__ for kind in type(error).__mro__}:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _PEER_WORDS)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
