"""A silent hang becomes a failure: who waits for workers looks at their signs of life.

Raised as a lost worker: the flow replaces the workers and goes on from the last save.
"""

import time
from collections.abc import Callable
from pathlib import Path

from k31core.cluster.calls import WorkerLostError
from k31core.observe.progress import read_signs


class HangError(WorkerLostError):
    """A phase without a sign of life for longer than its limit: names phase, silence and the last sign."""


class SilenceWatch:
    """Looks at the signs of life in a run directory; make one for each call that is waited for."""

    def __init__(
        self, run_dir: Path, phase: str, limit_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The wait begins now. limit_s: `cluster.silence_timeout_s`."""
        self._run_dir, self._phase, self._limit_s, self._clock = run_dir, phase, limit_s, clock
        self._signs = read_signs(run_dir)
        self._at, self._what = clock(), "it began"

    def __call__(self) -> None:
        """Raise HangError when no worker has given a sign of life for `limit_s` seconds."""
        signs, now = read_signs(self._run_dir), self._clock()
        fresh = [worker for worker in sorted(signs) if signs[worker] != self._signs.get(worker)]
        if fresh:
            self._signs, self._at = signs, now
            self._what = f"{fresh[-1]}: {signs[fresh[-1]]}"
            return
        silent = now - self._at
        if silent > self._limit_s:
            raise HangError(
                f"phase {self._phase}: no sign of life for {silent:.0f} s (cluster.silence_timeout_s "
                f"{self._limit_s:g}); last: {self._what}. Look at the nodes' NCCL logs and InfiniBand ports; the "
                f"workers are replaced and the run goes on from its last save"
            )
