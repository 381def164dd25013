"""`k31 eval`: what it evaluates on, with which recipe, and what it refuses before anything is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from k31core.checkpoint.store import create_run
from k31core.recipe.errors import RecipeError
from k31core.recipe.eval_request import EvalDataError, EvalRequest, find_data
from k31core.recipe.load import load_recipe, resolve
from k31core.rollout.evaluation import draws, table_file


def test_data_is_a_path_a_path_in_the_data_directory_or_a_hub_name(tmp_path: Path) -> None:
    file = tmp_path / "AIME_2024.v2.jsonl"
    file.touch()
    assert find_data(str(file), tmp_path) == {"name": "aime-2024-v2", "source": "file", "path": str(file)}
    assert find_data(file.name, tmp_path)["path"] == str(file)
    (tmp_path / "some.folder").mkdir()
    assert find_data("some.folder", tmp_path)["name"] == "some-folder"
    hub = find_data("owner/AIME_2024", tmp_path)
    assert hub == {"name": "aime-2024", "source": "hub", "repo": "owner/AIME_2024"}
    for wrong in ("nowhere.jsonl", "owner/nowhere.parquet", "./a/b", "a/b/c", "nothing"):
        with pytest.raises(EvalDataError, match=r"neither a file or folder .* nor a data set on the Hub"):
            find_data(wrong, tmp_path)


def test_the_recipe_of_an_evaluation(tmp_path: Path) -> None:
    run = load_recipe("tiny", ["eval.max_prompts=5"])
    file = tmp_path / "it's a: set.jsonl"
    file.touch()
    wanted = EvalRequest(str(file), samples=8, temperature=1e-5, overrides=("data.heldout.split=test",))
    recipe = wanted.recipe(run, tmp_path)
    assert recipe.data.heldout is not None
    assert (recipe.data.heldout.path, recipe.data.heldout.split) == (str(file), "test")
    assert (recipe.eval.name, recipe.eval.samples_per_prompt, recipe.eval.temperature) == ("it-s-a-set", 8, 1e-5)
    assert recipe.eval.max_prompts is None, "the limit is for the recipe's own set"
    assert recipe.data.train == run.data.train
    own = EvalRequest().recipe(run, tmp_path)
    assert own == run
    greedy = EvalRequest(temperature=0.0).recipe(run, tmp_path)
    assert (greedy.eval.samples_per_prompt, greedy.eval.max_prompts) == (1, 5), "greedy answers are all equal"


def test_what_an_evaluation_cannot_be(tmp_path: Path) -> None:
    run = load_recipe("tiny")
    with pytest.raises(RecipeError, match=r"eval.temperature > 0: greedy samples are all equal"):
        EvalRequest(samples=4, temperature=0.0).recipe(run, tmp_path)
    with pytest.raises(RecipeError, match=r"model.name: 'tiny-k31' -> 'x': an evaluation cannot change"):
        EvalRequest(overrides=("model.name=x",)).recipe(run, tmp_path)
    with pytest.raises(RecipeError, match=r"train.lora.rank: 16 -> 8"):
        EvalRequest(overrides=("train.lora.rank=8",)).recipe(run, tmp_path)
    without = load_recipe("tiny", ["data.heldout=null"])
    with pytest.raises(RecipeError, match=r"no held-out data set .*--data FILE"):
        EvalRequest().recipe(without, tmp_path)


def test_k_and_the_names_of_tables(tmp_path: Path) -> None:
    assert [draws(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    settings = load_recipe("tiny").eval
    assert table_file(tmp_path, settings, 5, asked=False) == tmp_path / "eval" / "heldout-step-00005.json"
    assert table_file(tmp_path, settings, 5, asked=True).name == "heldout-step-00005-n4-t1.json"


def k31_eval(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k31core.cli.main", "eval", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    create_run(tmp_path, "mine", resolve(load_recipe("tiny")))
    before = json.loads((tmp_path / "mine" / "recipe.json").read_text())
    place = ("--save-dir", str(tmp_path))
    for arguments, message in (
        (("yours", *place), "yours is not a run directory; runs in"),
        (place, "has a save"),
        (("mine", "--data", "nowhere.jsonl", *place), "'nowhere.jsonl' is neither a file or folder"),
        (("mine", "--set", "model.name=x", *place), "an evaluation cannot change"),
    ):
        done = k31_eval(*arguments)
        assert done.returncode == 2 and message in done.stderr, (arguments, done.stderr)
    assert json.loads((tmp_path / "mine" / "recipe.json").read_text()) == before
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["recipe.json"]
