"""By hand: how many answers a second, and ten thousand hostile ones.

python -m tests.bench.bench_grading speed      throughput of both graders, and of bare math-verify processes
python -m tests.bench.bench_grading hostile    10,000 hostile answers: verdicts, kills, time, nothing executed
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from k31core.grading.extract import text_for_math_verify
from k31core.grading.pool import GraderPool
from k31core.grading.verdict import FAULTS
from k31core.rl.types import Verdict
from tests.unit.grading.hostile import hand_written, responses

_SENTENCE = "We add the two terms and simplify, which gives the value below after a little algebra. "
_OTHER = (
    ("\\frac{1}{2}", "0.5"),
    ("\\sqrt{12}", "2\\sqrt{3}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt{3}}{2}"),
    ("2\\pi", "6\\pi/3"),
    ("(1,2)", "(1,2)"),
    ("7\\frac{3}{4}", "31/4"),
    ("\\frac{3\\pi}{4}", "\\frac{\\pi}{4}"),
    ("x+1", "2x+1"),
    ("3\\sqrt{2}", "2\\sqrt{3}"),
    ("[0,1)", "[0,1]"),
    ("\\text{even}", "odd"),
    ("1-\\ln 2", "\\ln 2"),
)
"""(answer, label) pairs whose label is no integer."""


def rows(count: int, integer_share: float, seed: int = 0) -> list[tuple[str, str]]:
    """Answers as a math policy gives them: `integer_share` of the labels are integers, six of ten are right."""
    source = random.Random(seed)
    made = []
    for _ in range(count):
        if source.random() < integer_share:
            label = str(source.randint(0, 999))
            answer = label if source.random() < 0.6 else str(source.randint(0, 999))
        else:
            answer, label = source.choice(_OTHER)
        text = _SENTENCE * source.randint(5, 40)
        made.append((f"{text}</think>{_SENTENCE * 3}The answer is $\\boxed{{{answer}}}$.", label))
    return made


def speed(seconds: float) -> None:
    """Prints rows a second and processor time a row: of the pool, and of two bare processes with math-verify as it is.

    On a busy machine the processor time is the fair number: two free cores do 2 / (seconds a row) rows a second.
    """
    batch = rows(4000, 0.8)
    with GraderPool(workers=2) as pool:
        pool.grade_many(batch[:50], graders=("both",))
        for graders in (("deepscaler",), ("math_verify",), ("both",)):
            started, cpu, done = time.monotonic(), _cpu_of(pool), 0
            while time.monotonic() - started < seconds:
                part = batch[done % 4000 : done % 4000 + 200]
                pool.grade_many(part, graders=graders)
                done += len(part)
            _say(f"pool, {'+'.join(graders)}", done, time.monotonic() - started, _cpu_of(pool) - cpu)
        print(f"kills {pool.kills}, crashes {pool.crashes}")
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, initializer=_bare_start) as bare:
        bare.map(_bare_run, [(batch[:20], 0.1)] * 2)
        started = time.monotonic()
        runs = bare.map(_bare_run, [(batch, seconds)] * 2, chunksize=1)
        elapsed = time.monotonic() - started
    _say("two bare processes, math_verify", sum(n for n, _ in runs), elapsed, sum(cpu for _, cpu in runs))


def _say(name: str, done: int, seconds: float, cpu: float) -> None:
    print(f"{name}: {done / seconds:.0f} rows/s, {1000 * cpu / done:.3f} ms of processor a row, ", end="")
    print(f"{2 * done / cpu:.0f} rows/s on two free cores", flush=True)


def _cpu_of(pool: GraderPool) -> float:
    """Processor seconds of this process and of all workers, those that were replaced included."""
    template = pool._template._process.pid
    ticks = sum(_stat(template)[13:15]) + sum(sum(_stat(worker._pid)[11:13]) for worker in pool._workers)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[int]:
    """Fields of /proc/PID/stat after the name: 11 and 12 are its own time, 13 and 14 that of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return [0, *map(int, fields[1:])]


def _bare_start() -> None:
    import math_verify  # noqa: F401 - imported before the clock starts


def _bare_run(work: tuple[list[tuple[str, str]], float]) -> tuple[int, float]:
    """(rows, processor seconds) of math-verify as anyone would call it, in this process."""
    from math_verify import parse, verify

    batch, seconds = work
    started, cpu, done = time.monotonic(), time.process_time(), 0
    while time.monotonic() - started < seconds:
        response, label = batch[done % len(batch)]
        verify(parse(f"\\boxed{{{label}}}"), parse(text_for_math_verify(response)))
        done += 1
    return done, time.process_time() - cpu


async def _grade_two_at_a_time(pool: GraderPool, pairs: list[tuple[str, str]]) -> tuple[list[Verdict], list[float]]:
    """Verdicts and the seconds from question to verdict, two answers in the pool at any time (one a worker)."""
    verdicts: list[Verdict | None] = [None] * len(pairs)
    seconds = [0.0] * len(pairs)
    waiting = iter(range(len(pairs)))

    async def consume() -> None:
        for index in waiting:
            before = time.monotonic()
            verdicts[index] = await pool.grade(*pairs[index], graders=("both",))
            seconds[index] = time.monotonic() - before

    await asyncio.gather(consume(), consume())
    return [verdict for verdict in verdicts if verdict is not None], seconds


def hostile(count: int, wall_s: float, seed: int) -> None:
    """Grades hostile answers with both graders and prints what happened; exits with 1 if anything went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "executed"
        pairs = responses(count, seed, canary)
        with GraderPool(workers=2, wall_limit_s=wall_s, cpu_limit_s=wall_s, memory_limit_mb=512) as pool:
            pool.grade_many([("x</think>\\boxed{1}", "1")] * 2, graders=("both",))
            started = time.monotonic()
            verdicts, seconds = asyncio.run(_grade_two_at_a_time(pool, pairs))
            elapsed = time.monotonic() - started
            after = pool.grade_many([("x</think>\\boxed{\\sqrt{12}}", "2\\sqrt{3}")] * 100, graders=("both",))
            healthy = all((v.deepscaler, v.math_verify) == (1, 1) for v in after)
            kills, crashes = pool.kills, pool.crashes
        executed = canary.exists()
    valid = len(verdicts) == count and all(v.deepscaler in (0, 1) and v.math_verify in (0, 1) for v in verdicts)
    report = {
        "answers": count,
        "hand_written": len(hand_written(canary)),
        "seconds": round(elapsed, 1),
        "slowest_answer_s": round(max(seconds), 2),
        "median_answer_ms": round(1000 * sorted(seconds)[count // 2], 2),
        "kills": kills,
        "crashes": crashes,
        "all_verdicts_0_or_1": valid,
        "executed": executed,
        "pool_healthy_after": healthy,
        "deepscaler": dict(Counter(str(v.deepscaler_reason) for v in verdicts)),
        "math_verify": dict(Counter(str(v.math_verify_reason) for v in verdicts)),
        "faulty_share": sum(v.math_verify_reason in FAULTS for v in verdicts) / count,
    }
    print(json.dumps(report, indent=1))
    sys.exit(0 if valid and healthy and not executed else 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "hostile"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--wall-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.what == "speed":
        speed(options.seconds)
    else:
        hostile(options.count, options.wall_s, options.seed)


if __name__ == "__main__":
    main()
