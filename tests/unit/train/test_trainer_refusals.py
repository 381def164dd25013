"""What a trainer refuses before it reads weights: a checkpoint of other layers, a layout the model does not fit."""

import json
import shutil
from pathlib import Path

import pytest

from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.config import load_config
from k31core.model.weight_names import LayerListError
from k31core.parallel.mesh import LayoutError
from k31core.recipe.load import load_recipe
from k31core.train.trainer import build_trainer
from tests.unit.train.small_trainer import MODEL, OVERRIDES


def other_layers(target: Path, full: list[int], count: int = 7) -> Path:
    """The case's checkpoint under a configuration with full attention at `full` of `count` layers."""
    shutil.copytree(MODEL, target)
    raw = json.loads((target / "config.json").read_text())
    text = raw["text_config"]
    text["num_hidden_layers"] = count
    text["linear_attn_config"] |= {
        "full_attn_layers": full,
        "kda_layers": [n for n in range(1, count + 1) if n not in full],
    }
    text["dsa_config"]["dsa_layers"] = full
    (target / "config.json").write_text(json.dumps(raw))
    return target


@pytest.mark.parametrize(
    ("full", "count", "message"),
    [
        ([3, 7], 7, r"full_attn_layers \[3, 7\], the tensors of the index are those of \[4, 7\]"),
        ([4], 6, r"full_attn_layers \[4\], the tensors of the index are those of \[4, 7\]"),
        ([4, 7], 8, r"kda_layers \[1, 2, 3, 5, 6, 8\], the tensors of the index are those of \[1, 2, 3, 5, 6\]"),
    ],
)
def test_a_checkpoint_with_another_layer_list(
    full: list[int], count: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeCheckpoint, "load", lambda *_, **__: pytest.fail("weights were read"))
    directory = other_layers(tmp_path / "model", full, count)
    load_config(directory)
    with pytest.raises(LayerListError, match=message):
        build_trainer(load_recipe("tiny", OVERRIDES), directory)


def test_a_layout_that_does_not_divide_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeCheckpoint, "load", lambda *_, **__: pytest.fail("weights were read"))
    overrides = [*OVERRIDES, "train.backend=megatron", "train.parallel.tp=4"]
    with pytest.raises(LayoutError, match="heads 2 is not divisible by TP x CP 4"):
        build_trainer(load_recipe("tiny", overrides), MODEL)
