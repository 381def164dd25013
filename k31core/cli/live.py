"""The live display of a run: it reads the run directory, as any other reader could."""

import threading
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from k31core.observe import metrics as names
from k31core.observe.jsonl import read_lines

POLL_S = 0.5


class LiveDisplay:
    """One line a finished step, a bar, and what happens now. Use as a context manager around the flow."""

    def __init__(self, root: Path, last_step: int) -> None:
        self._root = root
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar = self._progress.add_task("preparing", total=last_step)
        self._ended = threading.Event()
        self._seen = len(read_lines(root / "ledger.jsonl")[0])
        self._shown = {row["step"] for row in read_lines(root / "metrics.jsonl")[0]}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5)
        self._progress.stop()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._poll()
        self._poll()

    def _poll(self) -> None:
        try:
            ledger, _ = read_lines(self._root / "ledger.jsonl")
            rows, _ = read_lines(self._root / "metrics.jsonl")
        except ValueError:
            return  # a line that is being replaced; the next poll sees it whole
        for record in ledger[self._seen :]:
            self._show_phase(record)
        self._seen = max(self._seen, len(ledger))
        for row in rows:
            if row["step"] not in self._shown:
                self._shown.add(row["step"])
                self.say(step_line(row))

    def _show_phase(self, record: dict[str, Any]) -> None:
        phase, step, outputs = record["phase"], record["step"], record["outputs"]
        after = {"prepare": "starting workers", "rollout": f"step {step}: training", "train": f"step {step}: sync"}
        now = after.get(phase, f"step {step + 1}: rollout" if phase in ("sync", "resume") else phase)
        done = step if phase in ("sync", "save", "report") else max(0, step - 1)
        self._progress.update(self._bar, description=now, completed=done)
        if phase == "resume" and record["inputs"].get("from"):
            self.say(f"restored from step {step}: {describe(outputs.get('restored'))}")
            if outputs.get("not_restored"):
                self.say(f"[yellow]not restored: {describe(outputs['not_restored'])}[/]")
        for why in outputs.get("rejected") or []:
            self.say(f"[yellow]passed over a save that is not valid: {why}[/]")
        if phase == "save":
            self.say(f"  saved {outputs['directory']}")
        if phase == "watchdog":
            for finding in outputs["findings"]:
                self.say(f"[yellow]watchdog: {finding['message']}[/]")

    def summary(self, result: dict[str, Any]) -> None:
        """The table at the end."""
        table = Table("", "", title=f"run {result['run']}", title_justify="left", show_header=False)
        table.add_row("steps", str(result["steps"]))
        if result["reward"]:
            first, last = result["reward"]
            table.add_row("reward, first five -> last five steps", f"{first:.3f} -> {last:.3f}")
        for name, value in result.get("heldout", {}).items():
            table.add_row(name, value)
        table.add_row("last save", f"step {result['saved']}" if result["saved"] else "none")
        self._console.print(table)
        self.say(f"run directory  {result['directory']}")
        for kind, path in result["report"].items():
            self.say(f"report ({kind})  {path}")


def step_line(row: dict[str, Any]) -> str:
    """One line about a step."""
    parts = [f"step {row['step']:>4}"]
    for name, label, form in (
        (names.RAW_REWARD, "reward", ".3f"),
        (names.RESPONSE_LEN_MEAN, "length", ".1f"),
        (names.TRUNCATED_RATIO, "truncated", ".2f"),
        (names.GRAD_NORM, "grad", ".4g"),
        (names.LOGPROB_ABS_DIFF, "logprob diff", ".1e"),
        (names.STEP_TIME, "time", ".1f"),
    ):
        if isinstance(row.get(name), int | float):
            parts.append(f"{label} {row[name]:{form}}")
    evals = [f"{name} {value:.3f}" for name, value in row.items() if name.startswith("eval/") and name.count("/") == 1]
    return "  ".join(parts + evals)


def describe(value: Any) -> str:
    """A list as words."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
