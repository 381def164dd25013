"""Hostile answers: each gets 0 or 1 within its limit, none is executed, and the pool works afterwards."""

import asyncio
import time
import unicodedata
from pathlib import Path

import pytest

from k31core.grading.deepscaler import grade_by_rules
from k31core.grading.extract import text_for_math_verify
from k31core.grading.pool import GraderPool
from k31core.grading.worker import ForbiddenEvent, refuse_side_effects
from k31core.rl.types import GradeReason
from tests.unit.grading.hostile import hand_written, python_attacks, responses

WALL_S = 1.0
SLACK_S = 20.0
"""For the kill and the replacement on a machine that is busy with other work."""
CALLER_CPU_S = 0.5
"""Processor time that one answer may cost in the caller's process, where no limit can stop it."""


def test_five_hundred_hostile_answers(tmp_path: Path) -> None:
    canary = tmp_path / "executed"
    pairs = responses(500, seed=3, canary=canary)
    assert len(hand_written(canary)) > 150
    with GraderPool(workers=2, wall_limit_s=WALL_S, cpu_limit_s=2, memory_limit_mb=512) as pool:
        pool.grade_many([("x</think>\\boxed{1}", "1")] * 2, graders=("both",))
        verdicts = pool.grade_many(pairs, graders=("both",))
        assert all(v.deepscaler in (0, 1) and v.math_verify in (0, 1) for v in verdicts)
        # Each by itself: the limit is one answer's, however many there are and however busy the machine is.
        assert pool.slowest_s < WALL_S + SLACK_S
        timed_out = [v for v in verdicts if GradeReason.TIMED_OUT in (v.deepscaler_reason, v.math_verify_reason)]
        assert pool.kills >= len(timed_out) > 0, "every time-out is a worker killed, and some of these must hang"
        assert answers_well(pool, 20), "the pool is healthy after"
    assert not canary.exists()
    # Only a 34 that is written there, in whatever digits, may pass for 34.
    written = ["".join(str(unicodedata.digit(c, c)) for c in response) for response, _ in pairs]
    wrongly_right = [
        text
        for text, pair, v in zip(written, pairs, verdicts, strict=True)
        if v.deepscaler and pair[1] == "34" and "34" not in text
    ]
    assert not wrongly_right


def answers_well(pool: GraderPool, count: int) -> bool:
    """Whether `count` easy answers are graded right; one that misses its limit on a busy machine is asked again."""
    easy = [("x</think>\\boxed{\\sqrt{12}}", "2\\sqrt{3}")] * count
    for _ in range(10):
        verdicts = pool.grade_many(easy, graders=("both",))
        late = [v for v in verdicts if GradeReason.TIMED_OUT in (v.deepscaler_reason, v.math_verify_reason)]
        if any((v.deepscaler, v.math_verify) != (1, 1) for v in verdicts if v not in late):
            return False
        if not late:
            return True
        easy = easy[: len(late)]
    return False


def test_the_callers_part_of_a_hostile_answer_is_bounded(tmp_path: Path) -> None:
    """Extraction, string rules and small numbers run in the caller's process, so their own bounds must hold."""
    worst, culprit = 0.0, ""
    for response, label in responses(500, seed=3, canary=tmp_path / "executed"):
        began = time.thread_time()
        grade_by_rules(response, label)
        text_for_math_verify(response)
        seconds = time.thread_time() - began
        if seconds > worst:
            worst, culprit = seconds, response[:200]
    assert worst < CALLER_CPU_S, culprit


def test_python_in_an_answer_is_text_to_every_grader(tmp_path: Path) -> None:
    canary = tmp_path / "executed"
    attacks = python_attacks(canary)
    with GraderPool(workers=2) as pool:
        for label in ("34", "x+1"):
            for wrapped in ("\\boxed{%s}", "$%s$", "answer: %s"):
                pairs = [("x</think>" + wrapped.replace("%s", attack), label) for attack in attacks]
                pool.grade_many(pairs, graders=("both",))
                # The label comes from a data set, but a data set is a file too.
                pool.grade_many([("x</think>\\boxed{34}", attack) for attack in attacks], graders=("both",))
    assert not canary.exists()


def test_parentheses_cannot_rewrite_the_comparison() -> None:
    # "(label)-(answer)" as one string would read x - (x+1) + (1) = 0.
    with GraderPool(workers=1) as pool:
        (verdict,) = pool.grade_many([("x</think>\\boxed{x+1)+(1}", "x")])
    assert verdict.deepscaler == 0


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("compile", (b"34", "<string>")),
        ("compile", ("import os", "<unknown>")),
        ("compile", (b"def monomial_mul(A): return __import__('os')", "<string>")),
        ("open", ("/etc/passwd", "r", 0)),
        ("open", ("/tmp/x", "w", 0)),
        ("os.system", ("id",)),
        ("os.posix_spawn", ("id",)),
        ("subprocess.Popen", ("id", [], None, None)),
        ("socket.connect", (None, ("127.0.0.1", 1))),
        ("import", ("torch", None, None, None, None)),
        ("pickle.find_class", ("os", "system")),
        ("ctypes.dlopen", ("libc",)),
    ],
)
def test_workers_refuse_side_effects(event: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(ForbiddenEvent, match=event.replace(".", r"\.")):
        refuse_side_effects(event, arguments)


def test_workers_may_import_sympy_late() -> None:
    refuse_side_effects("import", ("sympy.sets.handlers.functions", None, None, None, None))
    refuse_side_effects(
        "compile", (b"def monomial_mul(A, B):\n    (a0,) = A\n    (b0,) = B\n    return (a0 + b0,)\n", "")
    )


def test_a_hang_delays_only_itself() -> None:
    hang = ("x</think>$\\boxed{(a+b+c+d+1)^{40}(a-b-c-d-1)^{40}}$", "(a+b+c+d+1)^{40}(a-b-c-d-1)^{41}")
    easy = ("x</think>\\boxed{34}", "34")

    async def race(pool: GraderPool) -> int:
        slow = asyncio.create_task(pool.grade(*hang, graders=("math_verify",)))
        await asyncio.sleep(0.05)
        went_past = 0
        while went_past < 10 and not slow.done():
            assert (await pool.grade(*easy, graders=("math_verify",))).math_verify == 1
            went_past += not slow.done()
        assert (await slow).reason is GradeReason.TIMED_OUT
        return went_past

    with GraderPool(workers=2, wall_limit_s=6.0, cpu_limit_s=30) as pool:
        pool.grade_many([easy] * 4, graders=("math_verify",))
        assert asyncio.run(race(pool)) > 0, "answers went past the one that hangs"
        assert pool.kills == 1
