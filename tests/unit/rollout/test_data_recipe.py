"""A recipe's data from source to prepared directory: arithmetic, files, and a data set of the Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k31core.convert.tiny_tokenizer import write_tokenizer
from k31core.recipe.load import load_recipe
from k31core.rollout.data import PreparedSplit
from k31core.rollout.dataset_file import DataError
from tasks.dataset import describe_split, prepare_recipe_data
from tasks.download import describe_transfer
from tests.hub_lookalike.server import FakeRepo, HubLookalike

ROWS = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "label": str(n + 1)} for n in range(12)]
JSONL = "".join(json.dumps(row) + "\n" for row in (*ROWS, *ROWS[:3]))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory)
    return directory


def overridden(*data: str) -> Any:
    return load_recipe("tiny", data)


def test_the_file_of_a_recipe(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text(JSONL)
    recipe = overridden("data.train.source=file", "data.train.path=mine.jsonl", "data.heldout=null")
    result = prepare_recipe_data(recipe, model_dir, tmp_path / "data", print)
    split = PreparedSplit.open(Path(result["directory"]) / "train")
    assert [split.prompt(row).label for row in range(12)] == [str(n + 1) for n in range(12)]
    assert result["splits"]["train"]["duplicates"] == 3 and set(result["splits"]) == {"train"}
    assert describe_split(result["splits"]["train"]) == "12 prompts of 15 rows, 3 duplicates by prompt"
    assert {Path(file["path"]).name for file in result["files"]} == {"prompts.safetensors", "manifest.json"}
    json.dumps(result)
    assert prepare_recipe_data(recipe, model_dir, tmp_path / "data", print) == result
    (tmp_path / "data" / "mine.jsonl").write_text(JSONL[: len(JSONL) // 2 - 10])
    with pytest.raises(DataError, match=r"mine\.jsonl:\d+: not a JSON object"):
        prepare_recipe_data(recipe, model_dir, tmp_path / "data", print)


def test_a_data_set_of_the_hub(tmp_path: Path, model_dir: Path) -> None:
    script = (
        "import json,sys\nfrom pathlib import Path\nfrom k31core.recipe.load import load_recipe\n"
        "from tasks.dataset import prepare_recipe_data\n"
        "r=load_recipe('tiny',['data.train.source=hub','data.train.repo=org/sums','data.heldout=null'])\n"
        "print(json.dumps(prepare_recipe_data(r,Path(sys.argv[1]),Path(sys.argv[2]),print)))"
    )
    arguments = [sys.executable, "-c", script, str(model_dir), str(tmp_path / "data")]
    with HubLookalike() as hub:
        hub.add("org/sums", FakeRepo({"data/train.jsonl": JSONL.encode()}, repo_type="dataset"))
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        online = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=120)
    result = json.loads(online.stdout)
    assert result["splits"]["train"]["prompts"] == 12
    offline = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(offline.stdout) == result


def test_describe_transfer() -> None:
    from k31core.checkpoint.download import Transfer

    text = describe_transfer(Transfer(1_400_000_000_000, 12_300_000_000, 8_500_000_000, 96, 3, 10.0))
    assert text == "12.3 of 1400.0 GB, 3 of 96 files, 850 MB/s, 27 min left"
    assert describe_transfer(Transfer(10, 0)).endswith("0 MB/s, unknown time left")
