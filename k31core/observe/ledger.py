"""The run ledger: one line for each finished phase. It orders the run by sequence number, never by the clock."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from k31core.observe.jsonl import Journal, Record


class Phase(StrEnum):
    """What a ledger line is about."""

    ATTEMPT = "attempt"
    """A flow run began to work on this run directory; not progress in itself."""
    PREPARE = "prepare"
    CLUSTER = "cluster"
    """What every node reported before the workers were placed, and the InfiniBand ports that were left out."""
    NETWORK = "network"
    """The all-reduce over the trainer ranks after they started anew."""
    RESUME = "resume"
    """What was restored, from where, and what was not."""
    EVAL = "eval"
    EVAL_ASKED = "eval_asked"
    """`k31 eval`: a save evaluated because a person asked; no part of the run's steps and their metrics."""
    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"
    SAVE = "save"
    WATCHDOG = "watchdog"
    """The numbers ended the run; only a person continues it."""
    INTERRUPTED = "interrupted"
    """A person ended the run (Ctrl-C, cancel); only a person continues it."""
    REPORT = "report"


PROGRESS = (Phase.ROLLOUT, Phase.TRAIN, Phase.SAVE)
"""Phases whose commit counts as progress for the limit on automatic attempts."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One flow run that worked on the run directory."""

    flow_run_id: str
    run_count: int
    """How often Prefect started this flow run."""
    by: str
    """`user` (a person at the command line) or `service` (deployment, automation, schedule)."""


def has_ended(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run whose ledger this is came to its end, and nobody has begun to add steps since."""
    return _happened_last(records, {Phase.REPORT})


def waits_for_a_person(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a person or the watchdog ended the run: no service takes it up by itself."""
    return _happened_last(records, {Phase.INTERRUPTED, Phase.WATCHDOG})


def _happened_last(records: Sequence[Mapping[str, Any]], phases: set[Phase]) -> bool:
    """Whether one of `phases` came after the last attempt began."""
    for record in reversed(records):
        if record["phase"] in phases:
            return True
        if record["phase"] == Phase.ATTEMPT:
            return False
    return False


class Ledger:
    """Reads and appends `ledger.jsonl`. One writer: the holder of the run's lock."""

    def __init__(self, path: Path) -> None:
        """Open the ledger; a torn last line is dropped and `note` says so."""
        self._journal = Journal(path)
        self.note = self._journal.note

    @property
    def records(self) -> list[Record]:
        """All lines, oldest first."""
        return self._journal.records

    def append(
        self,
        phase: Phase,
        step: int,
        *,
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        seconds: float = 0.0,
    ) -> Record:
        """Record a finished phase; it is on disk when this returns. `seconds` comes from a monotonic clock."""
        record: Record = {
            "seq": self.records[-1]["seq"] + 1 if self.records else 1,
            "step": step,
            "phase": phase.value,
            "inputs": dict(inputs or {}),
            "outputs": dict(outputs or {}),
            "seconds": round(seconds, 6),
            "time": round(time.time(), 3),
        }
        self._journal.append(record)
        return record

    def last(self, phase: Phase, step: int | None = None) -> Record | None:
        """The newest line of `phase` (of `step`, where given)."""
        for record in reversed(self.records):
            if record["phase"] == phase and step in (None, record["step"]):
                return record
        return None

    def last_step(self, phase: Phase) -> int:
        """The step of the newest line of `phase`; 0 when there is none."""
        record = self.last(phase)
        return int(record["step"]) if record else 0

    def mark(self) -> list[int]:
        """How far the run ever came: highest step rolled out, trained, saved. Work done again does not raise it."""
        steps = {phase: [r["step"] for r in self.records if r["phase"] == phase] for phase in PROGRESS}
        return [max(steps[phase], default=0) for phase in PROGRESS]

    def begin_attempt(self, attempt: Attempt) -> None:
        """Record that a flow run starts to work here, and how far the run was then."""
        outputs = {"flow_run_id": attempt.flow_run_id, "run_count": attempt.run_count, "by": attempt.by}
        self.append(Phase.ATTEMPT, self.last_step(Phase.TRAIN), outputs={**outputs, "mark": self.mark()})

    def attempts_without_progress(self) -> int:
        """Attempts in a row, up to now, that began where the run still stands; a start by a person begins anew."""
        mark, count = self.mark(), 0
        for record in reversed(self.records):
            if record["phase"] == Phase.ATTEMPT:
                if record["outputs"]["mark"] != mark:
                    break
                count += 1
                if record["outputs"]["by"] == "user":
                    break
        return count
