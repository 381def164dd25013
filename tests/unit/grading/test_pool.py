"""The pool: limits, kills, replacement, order, closing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from k31core.grading import process
from k31core.grading.pool import GraderPool
from k31core.grading.verdict import GraderName, Outcome, combine, grader_names, reason_to_show
from k31core.rl.types import GradeReason

EASY = ("x</think>\\boxed{\\sqrt{12}}", "2\\sqrt{3}")
HANG = ("x</think>$\\boxed{(a+b+c+d+1)^{40}(a-b-c-d-1)^{40}}$", "(a+b+c+d+1)^{40}(a-b-c-d-1)^{41}")
"""math-verify expands these polynomials, which takes minutes."""


def test_a_hang_is_killed_at_the_wall_limit_and_the_worker_replaced() -> None:
    with GraderPool(workers=1, wall_limit_s=2.5, cpu_limit_s=60) as pool:
        assert pool.grade_many([EASY], graders=("both",))[0].deepscaler == 1
        for kills in (1, 2):
            started = time.monotonic()
            (verdict,) = pool.grade_many([HANG], graders=("math_verify",))
            assert (verdict.math_verify, verdict.reason) == (0, GradeReason.TIMED_OUT)
            assert 2.4 < time.monotonic() - started < 30.0, "the answer itself takes minutes"
            assert pool.kills == kills
            assert pool.grade_many([EASY], graders=("both",))[0].math_verify == 1
        assert pool.crashes == 0


def test_the_kernel_enforces_the_cpu_limit() -> None:
    with GraderPool(workers=1, wall_limit_s=60, cpu_limit_s=1) as pool:
        (verdict,) = pool.grade_many([HANG], graders=("math_verify",))
        assert (verdict.reason, pool.kills) == (GradeReason.TIMED_OUT, 1)
        assert pool.grade_many([EASY])[0].deepscaler == 1


def test_the_memory_limit_fails_the_answer_not_the_pool() -> None:
    with GraderPool(workers=1, wall_limit_s=60, cpu_limit_s=60, memory_limit_mb=12) as pool:
        (verdict,) = pool.grade_many([HANG], graders=("math_verify",))
        assert verdict.math_verify == 0
        assert verdict.reason in {GradeReason.GRADER_ERROR, GradeReason.WRONG}
        assert pool.grade_many([EASY])[0].deepscaler == 1


def test_a_worker_that_dies_is_replaced() -> None:
    with GraderPool(workers=1) as pool:
        pool.grade_many([EASY])
        os.kill(pool._workers[0]._pid, signal.SIGSEGV)
        time.sleep(0.2)
        verdicts = pool.grade_many([EASY, EASY])
        assert [v.reason for v in verdicts] == [GradeReason.GRADER_ERROR, GradeReason.CORRECT]
        assert (pool.kills, pool.crashes) == (0, 1)


def test_a_lost_template_is_started_again() -> None:
    with GraderPool(workers=1) as pool:
        pool.grade_many([EASY])
        os.kill(pool._template._process.pid, signal.SIGKILL)
        pool._template._process.wait(30)
        pool._workers[0].end()
        assert pool.grade_many([EASY])[0].deepscaler == 1


def test_verdicts_come_in_order_from_many_tasks_at_once() -> None:
    pairs = [(f"x</think>\\boxed{{{number}+\\sqrt{{2}}}}", f"\\sqrt{{2}}+{number % 7}") for number in range(40)]

    async def grade_all(pool: GraderPool) -> list[int | None]:
        tasks = [pool.grade(*pair, graders=("both",)) for pair in pairs]
        return [verdict.deepscaler for verdict in await asyncio.gather(*tasks)]

    with GraderPool(workers=2) as pool:
        assert asyncio.run(grade_all(pool)) == [int(number < 7) for number in range(40)]


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"1\n",
        b"[]\n",
        b'{"id":1,"score":1,"reason":"correct"}\n',
        b'{"id":0,"score":2,"reason":"correct"}\n',
        b'{"id":0,"score":1,"reason":"great"}\n',
        b'{"id":0,"score":1,"reason":"correct","x":1}\n',
        b'{"id":0,"score":true}\n',
        b"\xff\xfe\n",
    ],
)
def test_a_reply_that_is_no_reply_is_refused(reply: bytes) -> None:
    assert process._outcome(reply, 0) is None
    good = json.dumps({"id": 0, "score": 1, "reason": "correct"}).encode() + b"\n"
    assert process._outcome(good, 0) == Outcome(1, GradeReason.CORRECT)


def test_closing_ends_every_process() -> None:
    pool = GraderPool(workers=2)
    pool.grade_many([EASY, EASY], graders=("both",))
    pids = [pool._template._process.pid, *(worker._pid for worker in pool._workers)]
    pool.close()
    pool.close()
    time.sleep(0.2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade_many([EASY])


def test_a_pool_that_was_not_needed_closes_at_once() -> None:
    with GraderPool(workers=2) as pool:
        assert pool.grade_many([("x</think>\\boxed{34}", "34")])[0].deepscaler == 1
        process_id = pool._template._process.pid
        started = time.monotonic()
    assert time.monotonic() - started < 30.0
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_workers_end_with_a_killed_owner() -> None:
    script = (
        "import sys,time\nfrom k31core.grading.pool import GraderPool\npool=GraderPool(workers=1)\n"
        "pool.grade_many([('x</think>\\\\boxed{1+x}','x+1')])\nprint(pool._workers[0]._pid,flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_names_and_combined_reasons() -> None:
    assert grader_names(("math-verify", "both")) == (GraderName.MATH_VERIFY, GraderName.DEEPSCALER)
    for wrong in ((), ("sympy",)):
        with pytest.raises(ValueError, match="use 'deepscaler', 'math-verify' or 'both'"):
            grader_names(wrong)
    right, timed_out = Outcome(1, GradeReason.CORRECT), Outcome(0, GradeReason.TIMED_OUT)
    verdict = combine({GraderName.DEEPSCALER: right, GraderName.MATH_VERIFY: timed_out})
    assert (verdict.deepscaler, verdict.math_verify, verdict.reason) == (1, 0, GradeReason.CORRECT)
    assert verdict.math_verify_reason is reason_to_show(verdict) is GradeReason.TIMED_OUT
    assert combine({GraderName.DEEPSCALER: right}).math_verify is None


@pytest.mark.parametrize(
    "arguments", [{"workers": 0}, {"wall_limit_s": 0}, {"cpu_limit_s": -1}, {"memory_limit_mb": 0}]
)
def test_limits_are_checked(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"workers|limit"):
        GraderPool(**arguments)  # type: ignore[arg-type]
