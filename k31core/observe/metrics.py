"""Metric names that every reader of a run relies on, and `metrics.jsonl`: one object a step."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k31core.observe.jsonl import Journal, Record, read_lines

RAW_REWARD = "rollout/raw_reward"
"""Mean reward of the samples that are trained on."""
RAW_REWARD_UNFILTERED = "rollout/raw_reward_unfiltered"
"""Mean reward of every finished sample, dropped groups included."""
RESPONSE_LEN_MEAN = "rollout/response_len/mean"
TRUNCATED_RATIO = "rollout/truncated_ratio"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
"""Before clipping."""
LOGPROB_ABS_DIFF = "train/train_rollout_logprob_abs_diff"
LOGPROB_KL = "train/train_rollout_kl"
SC_TAIL_RATIO = "train/sc_tail_ratio"
SC_CORRECTION = "train/sc_correction"
CANARY_ABS_DIFF = "sync/canary_abs_diff"
"""Largest difference of the fixed trajectory's log-probs, trainer against engine, after a sync."""
SYNC_BYTES = "sync/bytes"
ROLLOUT_TIME = "perf/rollout_time"
TRAIN_TIME = "perf/train_time"
SYNC_TIME = "perf/update_weights_time"
SAVE_TIME = "perf/save_time"
STEP_TIME = "perf/step_time"
ORCHESTRATION_TIME = "perf/orchestration_time"
"""Step time that is in no phase: tasks, ledger, artifacts."""
ALLOCATED_AFTER_SYNC_MB = "memory/allocated_after_sync_mb"
HOST_RSS_MB = "memory/host_rss_mb"
"""Resident memory of trainer and engine processes."""

VOLATILE_PREFIXES = ("perf/", "memory/")
"""Times and memory: the only metrics that may differ between a run in one go and a resumed one."""


def is_volatile(name: str) -> bool:
    """True for a metric that depends on the machine's mood, not on the run."""
    return name.startswith(VOLATILE_PREFIXES)


class MetricsFile:
    """Writes `metrics.jsonl`. Recording a step again replaces it: one object a step, in step order."""

    def __init__(self, path: Path) -> None:
        """Open the file; `note` says what was repaired."""
        self._journal = Journal(path)
        self.note = self._journal.note

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of `step`."""
        later = [r for r in self.history if r["step"] > step]
        self._journal.replace(lambda record: record["step"] >= step, [{"step": step, **values}, *later])

    def drop_after(self, step: int) -> None:
        """Forget steps after `step`: they are about to be done again."""
        self._journal.replace(lambda record: record["step"] > step, [])

    @property
    def history(self) -> list[Record]:
        """All steps, oldest first."""
        return self._journal.records


def read_metrics(path: Path) -> list[Record]:
    """The metrics of a run, for readers without the run's lock; a torn last line is ignored."""
    records, _ = read_lines(path)
    return records


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One flat object from the phases' metrics. Raises ValueError when two phases report the same name."""
    merged: dict[str, Any] = {}
    for part in parts:
        twice = merged.keys() & part.keys()
        if twice:
            raise ValueError(f"metric {sorted(twice)[0]!r} is reported by two phases of the same step")
        merged.update(part)
    return merged
