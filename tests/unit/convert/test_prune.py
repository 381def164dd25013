"""Pruning: the kept layers are the same bytes under new numbers, and the configuration follows."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from k31core.checkpoint.native import INDEX, NativeCheckpoint
from k31core.convert.prune import prune, pruned_config
from k31core.convert.source import ConvertError
from k31core.model.config import load_config
from k31core.model.weight_names import IGNORED_PREFIXES, expected_names
from tests.unit.convert.sources import CASE, k3_copy


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    tensors = {}
    for shard in set(index.values()):
        with safe_open(directory / shard, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def test_kept_layers_are_renumbered_and_unchanged(tmp_path: Path) -> None:
    prune(CASE, tmp_path / "small", [1, 3, 7])
    before, after = _tensors(CASE), _tensors(tmp_path / "small")
    for old, new in ((0, 0), (2, 1), (6, 2)):
        prefix = f"language_model.model.layers.{old}."
        for name in (n for n in before if n.startswith(prefix)):
            moved = name.replace(prefix, f"language_model.model.layers.{new}.")
            assert torch.equal(before[name], after.pop(moved))
    assert set(after) == {name for name in before if ".layers." not in name}


def test_the_small_checkpoint_is_one_our_reader_takes(tmp_path: Path) -> None:
    prune(CASE, tmp_path / "small", [1, 2, 3, 4])
    config = load_config(tmp_path / "small")
    assert config.num_hidden_layers == 4
    assert config.mla_layers == (3,)
    NativeCheckpoint(tmp_path / "small").check_names(expected_names(config), IGNORED_PREFIXES)


def test_layer_lists_follow() -> None:
    config = json.loads((CASE / "config.json").read_text())
    text = pruned_config(config, [1, 5, 7])["text_config"]
    assert text["linear_attn_config"]["kda_layers"] == [1, 2]
    assert text["linear_attn_config"]["full_attn_layers"] == [3]
    assert text["dsa_config"]["dsa_layers"] == [3]
    assert config["text_config"]["num_hidden_layers"] == 7


@pytest.mark.parametrize(
    ("keep", "message"),
    [([], "rising"), ([2, 1], "rising"), ([1, 9], "from 1 to 7"), ([1, 2, 3], "full_attn_layers"), ([4], "kda_layers")],
)
def test_what_is_no_model_is_refused(keep: list[int], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        pruned_config(json.loads((CASE / "config.json").read_text()), keep)


def test_never_into_a_checkpoint(tmp_path: Path) -> None:
    prune(CASE, tmp_path / "small", [1, 4])
    with pytest.raises(ConvertError, match="already holds"):
        prune(CASE, tmp_path / "small", [1, 4])


def test_a_kimi_k3_checkpoint_is_pruned_too(tmp_path: Path) -> None:
    prune(k3_copy(tmp_path), tmp_path / "small", [1, 2, 3, 4])
    config = load_config(tmp_path / "small")
    assert (config.family, config.num_hidden_layers, config.dsa) == ("kimi_k3", 4, None)


def test_only_what_stays_is_read(tmp_path: Path) -> None:
    """Bytes that this process asked the kernel for, against the bytes of the kept tensors."""

    def read_so_far() -> int:
        return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))

    before = read_so_far()
    prune(CASE, tmp_path / "small", [1, 4])
    asked = read_so_far() - before
    kept = sum(path.stat().st_size for path in (tmp_path / "small").glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in CASE.glob("*.safetensors"))
    headers = 0
    for path in CASE.glob("*.safetensors"):
        with path.open("rb") as file:
            headers += 8 + int.from_bytes(file.read(8), "little")
    small_files = (CASE / INDEX).stat().st_size + 4 * (CASE / "config.json").stat().st_size
    assert kept + 3 * headers + 2 * small_files < whole + headers, "the case is too small to tell"
    assert asked < kept + 3 * headers + 2 * small_files


def test_shards_and_index_agree(tmp_path: Path) -> None:
    prune(CASE, tmp_path / "small", [1, 2, 3, 4], shard_bytes=50_000)
    index = json.loads((tmp_path / "small" / INDEX).read_text())
    shards = {path.name for path in (tmp_path / "small").glob("*.safetensors")}
    assert len(shards) > 1 and set(index["weight_map"].values()) == shards
    tensors = _tensors(tmp_path / "small")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
