"""Which requests run: admission in arrival order up to the limits, rows without holes, pages of the cache. No torch.

Every request reserves the pages of its longest possible answer when it is admitted, so nothing that runs is ever
evicted.
"""

from collections import deque
from dataclasses import dataclass, field

from k31core.rl.types import GenerateRequest
from k31core.rollout.engines.embedded.output import Output


@dataclass(slots=True, eq=False)
class Running:
    """An admitted request."""

    request: GenerateRequest
    pages: list[int]
    output: Output
    row: int = -1
    """Row of the running batch; -1 until its prompt is done."""

    @property
    def prompt_length(self) -> int:
        """P."""
        return len(self.request.tokens)


@dataclass(slots=True)
class Scheduler:
    """Rows, pages and the queue. `pages` counts usable pages (1 .. pages); page 0 is never given out."""

    max_rows: int
    pages: int
    page_tokens: int
    waiting: deque[GenerateRequest] = field(default_factory=deque)
    prompts: deque[Running] = field(default_factory=deque)
    """Admitted, prompt not yet computed."""
    rows: list[Running] = field(default_factory=list)
    """The running batch: `rows[i].row == i`."""
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.pages, 0, -1))

    @property
    def busy(self) -> bool:
        """Anything waits or runs."""
        return bool(self.waiting or self.prompts or self.rows)

    def pages_of(self, request: GenerateRequest) -> int:
        """Pages for the prompt and the longest answer (whose last token is never an input)."""
        return -(-(len(request.tokens) + request.params.max_new_tokens - 1) // self.page_tokens)

    def admit(self) -> list[Running]:
        """Move waiting requests in, strictly in order, while rows and pages last."""
        admitted: list[Running] = []
        while self.waiting and len(self.rows) + len(self.prompts) < self.max_rows:
            need = self.pages_of(self.waiting[0])
            if need > len(self._free):
                break
            request = self.waiting.popleft()
            running = Running(request, [self._free.pop() for _ in range(need)], Output.for_request(request))
            self.prompts.append(running)
            admitted.append(running)
        return admitted

    def start(self, running: Running) -> int:
        """The prompt is done: append to the batch; returns the row. The caller removes it from `prompts`."""
        running.row = len(self.rows)
        self.rows.append(running)
        return running.row

    def finish(self, done: list[Running]) -> list[tuple[int, int]]:
        """Remove from the batch; returns the (from, to) row moves that close the holes."""
        moves: dict[int, int] = {}
        origin = {running: running.row for running in self.rows}
        for running in sorted(done, key=lambda r: r.row, reverse=True):
            last = self.rows.pop()
            if last is not running:
                last.row = running.row
                self.rows[running.row] = last
                moves[origin[last]] = running.row
            running.row = -1
            self.release(running)
        return sorted(moves.items())

    def release(self, running: Running) -> None:
        """Give the pages back."""
        self._free.extend(reversed(running.pages))
        running.pages = []
