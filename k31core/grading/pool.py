"""A pool of killable grader processes, for the rollout loop (`await grade`) and for files (`grade_many`).

deepscaler's string rules and small numbers are decided here, within bounded lengths; algebra and math-verify go to the
workers. Each worker serves one answer at a time under a wall-clock, CPU and memory limit; at a limit it is killed and
replaced by a fresh fork, so a hanging answer costs one worker for its own limit and nothing else.

    caller ──► grade_by_rules ──► queue ──► one thread a worker ──► socket ──► worker process
                                                                  (killed at its deadline, forked again by the template)
"""

import asyncio
import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from k31core.grading.deepscaler import Unsettled, grade_by_rules
from k31core.grading.extract import text_for_math_verify
from k31core.grading.limits import MAX_MATH_VERIFY_CHARS, WorkerLimits
from k31core.grading.process import Template, WorkerProcess
from k31core.grading.verdict import GraderName, Outcome, combine, grader_names
from k31core.rl.types import GradeReason, Verdict

_Job = tuple[dict[str, Any], "Future[Outcome]"]
_REFUSED = Outcome(0, GradeReason.REFUSED)


class GraderPool:
    """Grades answers with `workers` processes. Use it as a context manager, or call `close`.

    Safe to use from several threads and event loops. Starting is not waited for: the first answer that needs a worker
    waits for the template process (about two seconds).
    """

    def __init__(
        self, *, workers: int = 2, wall_limit_s: float = 5.0, cpu_limit_s: float = 5.0, memory_limit_mb: int = 1024
    ) -> None:
        if workers < 1:
            raise ValueError(f"a grader pool of {workers} workers: use 1 or more")
        self._limits = WorkerLimits(wall_s=wall_limit_s, cpu_s=cpu_limit_s, memory_mb=memory_limit_mb)
        self._template = Template(self._limits)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._workers = [WorkerProcess(self._template) for _ in range(workers)]
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"grader-{index}", daemon=True)
            for index, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def kills(self) -> int:
        """Workers lost to a limit (killed at the wall clock, or by the kernel at the CPU limit), all replaced."""
        return sum(worker.kills for worker in self._workers)

    @property
    def crashes(self) -> int:
        """Workers lost in any other way (memory, a crash of a library, a reply that is no reply), all replaced."""
        return sum(worker.crashes for worker in self._workers)

    @property
    def slowest_s(self) -> float:
        """The longest that one answer took in a worker, from question to verdict; its limit is `wall_limit_s`."""
        return max(worker.slowest_s for worker in self._workers)

    async def grade(self, response: str, label: str, *, graders: tuple[str, ...] = ("deepscaler",)) -> Verdict:
        """The verdict on one answer; the first grader named is the one that trains."""
        futures = self._submit(response, label, grader_names(graders))
        return combine({name: await asyncio.wrap_future(future) for name, future in futures.items()})

    def grade_many(
        self, pairs: Iterable[tuple[str, str]], *, graders: tuple[str, ...] = ("deepscaler",)
    ) -> list[Verdict]:
        """The verdicts on (response, label) pairs, in their order."""
        names = grader_names(graders)
        submitted = [self._submit(response, label, names) for response, label in pairs]
        return [combine({name: future.result() for name, future in futures.items()}) for futures in submitted]

    def close(self) -> None:
        """Ends the workers. Answers still waiting fail with RuntimeError; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        self._template.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, response: str, label: str, names: tuple[GraderName, ...]) -> "dict[GraderName, Future[Outcome]]":
        if self._closed:
            raise RuntimeError("the grader pool is closed")
        return {
            name: self._deepscaler(response, label)
            if name is GraderName.DEEPSCALER
            else self._math_verify(response, label)
            for name in names
        }

    def _deepscaler(self, response: str, label: str) -> "Future[Outcome]":
        settled = grade_by_rules(response, label)
        if isinstance(settled, Unsettled):
            return self._enqueue({"kind": "pairs", "pairs": settled.pairs})
        return _done(settled)

    def _math_verify(self, response: str, label: str) -> "Future[Outcome]":
        text = text_for_math_verify(response)
        if max(len(text), len(label)) > MAX_MATH_VERIFY_CHARS:
            return _done(_REFUSED)
        return self._enqueue({"kind": "math_verify", "text": text, "label": label})

    def _enqueue(self, request: dict[str, Any]) -> "Future[Outcome]":
        future: Future[Outcome] = Future()
        self._jobs.put(({"id": next(self._numbers), **request}, future))
        return future

    def _serve(self, worker: WorkerProcess) -> None:
        """One thread: takes jobs for its worker until the pool closes."""
        while (job := self._jobs.get()) is not None:
            request, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._closed:
                    raise RuntimeError("the grader pool was closed before this answer was graded")
                future.set_result(worker.ask(request))
            except Exception as error:
                future.set_exception(error)
        worker.end()


def _done(outcome: Outcome) -> "Future[Outcome]":
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
