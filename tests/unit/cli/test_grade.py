"""`k31 grade` and `k31 verify-model` as a user calls them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parents[2] / "cases"


def k31(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k31core.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_grade_prints_a_json_line_a_row(tmp_path: Path) -> None:
    cases = json.loads((CASES / "deepscaler.json").read_text())
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"response": c["response"], "label": c["label"]}) + "\n" for c in cases))
    both = k31("grade", str(file))
    assert both.returncode == 0, both.stderr
    results = [json.loads(line) for line in both.stdout.splitlines()]
    assert [list(result) for result in results] == [["row", "deepscaler", "math_verify", "reason"]] * len(cases)
    assert [result["row"] for result in results] == list(range(len(cases)))
    assert [(r["deepscaler"], r["math_verify"]) for r in results] == [
        (c["deepscaler"], c["math_verify"]) for c in cases
    ]
    assert results[0]["reason"] == "no_think_end" and results[1]["reason"] == "correct"
    assert "22 rows: deepscaler 0.5000, math_verify 0.7273, disagreement" in both.stderr
    alone = k31("grade", "-", "--grader", "deepscaler", "--no-summary", stdin=file.read_text())
    assert alone.stderr == ""
    assert {json.loads(line)["math_verify"] for line in alone.stdout.splitlines()} == {None}


def test_grade_names_a_bad_row(tmp_path: Path) -> None:
    good = json.dumps({"response": "x</think>\\boxed{34}", "label": "34"}) + "\n"
    file = tmp_path / "rows.jsonl"
    for bad, message in (('{"response": "x", "label": 34}', "`label` is int"), ("{", "not a JSON object")):
        file.write_text(good + bad + "\n")
        done = k31("grade", str(file))
        assert done.returncode == 2 and f"{file}:2: {message}" in done.stderr
    assert "no rows" in k31("grade", "-").stderr
    assert "cannot be read" in k31("grade", str(tmp_path / "nothing")).stderr


def test_verify_model_exits_by_what_it_finds(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(CASES / "model" / "tiny-k31", model)
    good = k31("verify-model", str(model))
    assert good.returncode == 0 and good.stdout.splitlines()[-1] == "all right"
    shard = model / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    bad = k31("verify-model", str(model), "--json")
    assert bad.returncode == 1
    report = json.loads(bad.stdout)
    assert not report["ok"] and report["problems"][0]["path"] == shard.name
    missing = k31("verify-model", str(tmp_path / "nothing"))
    assert missing.returncode == 2 and "no such directory" in missing.stderr
