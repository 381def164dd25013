"""Ledger, prompt ledger and metrics: what survives a kill, and what counts once."""

from pathlib import Path

import pytest

from k31core.observe.jsonl import JournalError, read_lines
from k31core.observe.ledger import Attempt, Ledger, Phase, has_ended, waits_for_a_person
from k31core.observe.metrics import MetricsFile, is_volatile, merge
from k31core.observe.prompts import PromptLedger, PromptLedgerError


def test_a_torn_last_line_is_dropped_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(Phase.ROLLOUT, 1, outputs={"x": 1})
    ledger.append(Phase.TRAIN, 1)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1])):
        path.write_bytes(whole[:-cut])
        again = Ledger(path)
        assert [r["phase"] for r in again.records] == ["rollout"]
        assert "torn last line" in (again.note or "")
        again.append(Phase.TRAIN, 1)
        assert [r["seq"] for r in Ledger(path).records] == [1, 2]
    assert Ledger(path).note is None


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for step in range(3):
        ledger.append(Phase.TRAIN, step)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{broken\n" + lines[2])
    with pytest.raises(JournalError, match="line 2"):
        Ledger(path)
    assert path.read_bytes() == lines[0] + b"{broken\n" + lines[2]


def test_the_ledger_is_ordered_by_sequence_even_when_the_clock_goes_back(tmp_path: Path, monkeypatch) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(Phase.TRAIN, 1)
    monkeypatch.setattr("k31core.observe.ledger.time.time", lambda: 1000.0)
    ledger.append(Phase.TRAIN, 2)
    again = Ledger(tmp_path / "ledger.jsonl")
    assert again.last_step(Phase.TRAIN) == 2
    assert again.records[0]["time"] > again.records[1]["time"] and again.records[1]["seq"] == 2


def test_attempts_without_progress(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    user, service = Attempt("f", 1, "user"), Attempt("f", 2, "service")
    ledger.begin_attempt(user)
    ledger.append(Phase.ROLLOUT, 1)
    ledger.append(Phase.TRAIN, 1)
    assert ledger.attempts_without_progress() == 0
    ledger.begin_attempt(service)
    assert ledger.attempts_without_progress() == 1
    # work that was done before and is done again is no progress
    ledger.append(Phase.TRAIN, 1)
    ledger.begin_attempt(service)
    assert ledger.attempts_without_progress() == 2
    ledger.append(Phase.SAVE, 1)
    assert ledger.attempts_without_progress() == 0
    ledger.begin_attempt(service)
    ledger.begin_attempt(service)
    ledger.begin_attempt(user)
    assert ledger.attempts_without_progress() == 1, "a person's start begins a new count"


def test_what_a_ledger_says_about_its_run(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert not has_ended(ledger.records) and not waits_for_a_person(ledger.records)
    ledger.begin_attempt(Attempt("f", 1, "user"))
    ledger.append(Phase.TRAIN, 1)
    ledger.append(Phase.INTERRUPTED, 1)
    assert waits_for_a_person(ledger.records)
    ledger.begin_attempt(Attempt("g", 1, "user"))
    assert not waits_for_a_person(ledger.records)
    ledger.append(Phase.REPORT, 2)
    ledger.append(Phase.EVAL, 2)
    assert has_ended(ledger.records)
    ledger.begin_attempt(Attempt("h", 1, "user"))
    assert not has_ended(ledger.records), "it goes on with more steps"


def test_a_prompt_has_one_final_state_a_step(tmp_path: Path) -> None:
    prompts = PromptLedger(tmp_path / "prompts.jsonl")
    first = [{"prompt_id": "a", "state": "trained"}, {"prompt_id": "b", "state": "dropped"}]
    prompts.record(1, first)
    prompts.record(2, [{"prompt_id": "b", "state": "trained"}])
    prompts.record(1, first)
    assert prompts.counts() == {"trained": 2, "dropped": 1}
    assert PromptLedger(tmp_path / "prompts.jsonl").states(1) == {"a": "trained", "b": "dropped"}
    assert [r["step"] for r in read_lines(tmp_path / "prompts.jsonl")[0]] == [1, 1, 2], "in the order of the steps"
    kept = [{"prompt_id": "a", "row": row, "state": "trained"} for row in (3, 7)]
    prompts.record(3, kept)  # duplicates that the recipe keeps are draws of their own
    assert prompts.counts()["trained"] >= 2
    with pytest.raises(PromptLedgerError, match="two final states"):
        prompts.record(3, [{"prompt_id": "c", "state": "trained"}, {"prompt_id": "c", "state": "dropped"}])
    with pytest.raises(PromptLedgerError, match="needs `prompt_id` and `state`"):
        prompts.record(3, [{"prompt_id": "c"}])


def test_metrics_hold_one_object_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (1, 2, 3):
        metrics.record(step, {"train/loss": float(step)})
    metrics.record(2, {"train/loss": 20.0})
    rows, note = read_lines(path)
    assert note is None and [(r["step"], r["train/loss"]) for r in rows] == [(1, 1.0), (2, 20.0), (3, 3.0)]
    metrics.record(4, {"train/loss": float("nan")})
    assert MetricsFile(path).history[-1]["train/loss"] != MetricsFile(path).history[-1]["train/loss"]


def test_a_metric_has_one_reporter() -> None:
    assert merge([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' is reported by two phases"):
        merge([{"a": 1}, {"a": 2}])
    assert is_volatile("perf/step_time") and not is_volatile("train/loss")
