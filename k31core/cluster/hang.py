"""A silent hang becomes a failure: pure arithmetic on the time of the last sign of life."""

from dataclasses import dataclass


class HangError(RuntimeError):
    """A phase without progress for longer than its limit: names phase, silence and the last sign of life."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The last sign of life of a phase."""

    phase: str
    at: float
    """Seconds on any clock that only rises."""
    what: str
    """E.g. `rank 3 finished microbatch 17`."""


def check_progress(last: Progress, now: float, limit_s: float) -> None:
    """Raise HangError when nothing has happened for `limit_s` seconds."""
    silent = now - last.at
    if silent > limit_s:
        raise HangError(
            f"phase {last.phase}: no progress for {silent:.0f} s (limit {limit_s:.0f} s); last: {last.what}. "
            f"Look at the node's NCCL log and InfiniBand ports, then resume"
        )


def seconds_left(last: Progress, now: float, limit_s: float) -> float:
    """Time until `check_progress` would raise; 0 when it would now."""
    return max(0.0, limit_s - (now - last.at))
