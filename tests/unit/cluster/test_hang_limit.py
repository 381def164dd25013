"""The limit on silence."""

import pytest

from k31core.cluster.hang import HangError, Progress, check_progress, seconds_left

LAST = Progress("rollout", at=100.0, what="request 17 finished")


def test_silence_within_the_limit_is_fine() -> None:
    check_progress(LAST, now=160.0, limit_s=60.0)
    assert seconds_left(LAST, now=130.0, limit_s=60.0) == 30.0


def test_longer_silence_names_phase_and_last_sign() -> None:
    with pytest.raises(HangError, match=r"phase rollout: no progress for 61 s \(limit 60 s\); last: request 17 fin"):
        check_progress(LAST, now=161.0, limit_s=60.0)
    assert seconds_left(LAST, now=161.0, limit_s=60.0) == 0.0
