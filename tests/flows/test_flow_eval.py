"""Stage `eval` of the flow: other data, an older save, other sampling; a bounded table in the UI, the run untouched."""

import json

import pytest

pytestmark = [pytest.mark.flows, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def states(lab) -> list[dict]:
    (lab.runs / "aime-2024.jsonl").touch()  # the small workers do not read it
    saved = {"save_dir": str(lab.runs), "run_id": "evaluated", "stage": "eval"}
    return lab.run(
        lab.parameters("evaluated", steps=3, overrides=("save.interval=2",)),
        saved | {"data": str(lab.runs / "aime-2024.jsonl"), "step": 2, "n_samples_per_eval_prompt": 8},
        saved | {"temperature": 0.5, "overrides": ["eval.name=other"]},
        saved | {"step": 0},
        saved | {"step": 1},
        saved | {"data": "nowhere.jsonl"},
    )


def test_a_save_is_evaluated_and_the_run_stays_as_it_is(lab, states) -> None:
    assert [state["name"] for state in states] == [*["Completed"] * 4, "Failed", "Stopped"], states
    assert "no valid save of step 1; saved steps: 2, 3" in states[4]["message"]
    assert "'nowhere.jsonl' is neither a file or folder" in states[5]["message"]
    root = lab.runs / "evaluated"
    recipe = json.loads((root / "recipe.json").read_text())["recipe"]
    assert (recipe["eval"]["name"], recipe["data"]["heldout"]["name"]) == ("heldout", "arithmetic")
    assert not list(root.glob("recipe-*.json"))
    asked = [r for r in lab.ledger("evaluated") if r["phase"] == "eval_asked"]
    assert [(r["step"], r["inputs"]) for r in asked] == [
        (2, {"policy_version": 2, "data": "aime-2024"}),
        (3, {"policy_version": 3, "data": "other"}),
        (0, {"policy_version": -1, "data": "heldout"}),
    ]
    assert "eval/aime-2024" in asked[0]["outputs"]["metrics"]
    assert asked[0]["outputs"]["table"] == str(root / "eval" / "aime-2024-step-00002-n8-t1.json")
    table = json.loads((root / "eval" / "aime-2024-step-00002-n8-t1.json").read_text())
    assert len(table["problems"]) == 300
    metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert not any("eval/aime-2024" in row for row in metrics), "not a metric of a step"


def test_the_table_in_the_ui_is_bounded_and_says_where_the_rest_is(lab, states) -> None:
    artifacts = lab.post("/artifacts/latest/filter", {"limit": 200})
    (found,) = (a for a in artifacts if a["key"] == "k31-eval-evaluated-aime-2024")
    rows = json.loads(found["data"])
    assert len(rows) == 200
    assert rows[0] == {
        "row": 0,
        "problem": "p",
        "label": "34",
        "correct": "1/2",
        "truncated": 1,
        "mean length": 3.0,
        "reason": "correct 1, no_box 1",
    }
    assert "the first 200 of 300 problems" in found["description"]
    assert str(lab.runs / "evaluated" / "eval" / "aime-2024-step-00002-n8-t1.json") in found["description"]
    keys = {a["key"] for a in artifacts}
    assert {"k31-eval-evaluated-heldout", "k31-eval-evaluated-other"} <= keys
