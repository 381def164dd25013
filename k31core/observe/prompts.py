"""The prompt ledger: every prompt drawn ends in exactly one state, recorded once for each step that drew it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k31core.observe.jsonl import Journal


class PromptLedgerError(ValueError):
    """A prompt record without a state, or with two."""


class PromptLedger:
    """Reads and appends `prompts.jsonl`: `{"step", "prompt_id", "state", ...}`."""

    def __init__(self, path: Path) -> None:
        """Open the ledger; `note` says what was repaired."""
        self._journal = Journal(path)
        self.note = self._journal.note

    def record(self, step: int, prompts: Iterable[Mapping[str, Any]]) -> None:
        """Record the final states of one step; recording the same step again replaces it in its
        place, so nothing counts twice and the order is that of the steps however often the run was taken up."""
        rows = [{"step": step, **prompt} for prompt in prompts]
        seen: set[tuple[str, int, int]] = set()
        for row in rows:
            if not row.get("prompt_id") or not row.get("state"):
                raise PromptLedgerError(f"step {step}: prompt record {row} needs `prompt_id` and `state`")
            # Kept duplicates have one id and different rows: each row drawn is a draw of its own.
            key = (str(row["prompt_id"]), int(row.get("row", 0)), int(row.get("epoch", 0)))
            if key in seen:
                raise PromptLedgerError(
                    f"step {step}: prompt {key[0]} (row {key[1]}, epoch {key[2]}) has two final states"
                )
            seen.add(key)
        later = [record for record in self._journal.records if record["step"] > step]
        self._journal.replace(lambda record: record["step"] >= step, [*rows, *later])

    def states(self, step: int) -> dict[str, str]:
        """`{prompt_id: state}` of one step."""
        return {r["prompt_id"]: r["state"] for r in self._journal.records if r["step"] == step}

    def counts(self) -> Counter[str]:
        """How many draws ended in each state."""
        return Counter(r["state"] for r in self._journal.records)
