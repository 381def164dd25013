"""torch_dist: written at one layout, read at others, bit for bit against the BF16 checkpoint's own tensors."""

import json
from pathlib import Path

import pytest

from k31core.checkpoint.torch_dist import FACTS, TorchDistError
from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
from k31core.recipe.train import ParallelRecipe
from tests.parity.ranks import RankFailedError, run_ranks
from tests.unit.convert.sources import CASE, change_byte, k3_copy, mxfp4_copy, shard_of


def convert(rank: int, world: int, source: str, target: str, layout: dict[str, int]) -> None:
    from k31core.convert.bf16_to_torch_dist import convert_to_torch_dist

    convert_to_torch_dist(Path(source), Path(target), ParallelRecipe(**layout))


def read_back(
    rank: int, world: int, bf16: str, source: str, layout: dict[str, int], mxfp4: str | None = None
) -> list[str]:
    """Names of this rank's tensors, after comparing each with the BF16 checkpoint's own bytes."""
    import torch

    from k31core.checkpoint.native import NativeCheckpoint
    from k31core.checkpoint.tensor_file import TensorFile
    from k31core.convert.bf16_to_torch_dist import bf16_decoder
    from k31core.model.config import load_config
    from k31core.parallel.groups import build_mesh
    from k31core.parallel.mesh import stage_layers
    from k31core.train.base_weights import bf16_slots, load_reference

    parallel = ParallelRecipe(**layout)
    mesh = build_mesh(parallel)
    config = load_config(Path(bf16), quantized=False)
    ends = (parallel.first_stage_layers, parallel.last_stage_layers)
    layers = stage_layers(config.num_hidden_layers, parallel.pp, *ends)[mesh.pp.rank]
    decoder = bf16_decoder(config, mesh, layers)
    slots = bf16_slots(decoder)
    for slot in slots:
        slot.tensor.detach().fill_(7.0)
    load_reference(decoder, Path(source), None if mxfp4 is None else Path(mxfp4))
    checkpoint = NativeCheckpoint(Path(bf16))
    for slot in slots:
        with TensorFile(checkpoint.directory / checkpoint.shard_of[slot.name]) as file:
            expected = (
                file.read(slot.name)[: slot.shard.shape[0]] if slot.shard.zero_padded_to else file.read(slot.name)
            )
        expected = slot.shard.take(expected).to(slot.tensor.dtype)
        assert torch.equal(slot.tensor.detach(), expected), slot.name
    return [slot.name for slot in slots]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("convert") / "bf16"
    convert_to_bf16(CASE, directory, workers=1)
    return directory


@pytest.fixture(scope="module")
def converted(bf16: Path) -> Path:
    target = bf16.parent / "torch_dist"
    run_ranks(2, convert, str(bf16), str(target), {"tp": 2, "ep": 2})
    return target


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 1},
        {"tp": 2, "dp": 2, "ep": 4},
        {"pp": 2, "first_stage_layers": 4, "last_stage_layers": 3},
        pytest.param(
            {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "first_stage_layers": 4, "last_stage_layers": 3},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_any_layout_reads_the_same_bits(bf16: Path, converted: Path, layout: dict[str, int]) -> None:
    parallel = ParallelRecipe(**layout)
    names = run_ranks(parallel.world_size, read_back, str(bf16), str(converted), layout)
    held = {name for rank in names for name in rank}
    assert held == set(json.loads((bf16 / "model.safetensors.index.json").read_text())["weight_map"])


def test_a_torch_dist_of_another_model_is_refused(bf16: Path, converted: Path) -> None:
    facts = json.loads((converted / FACTS).read_text())
    other = bf16.parent / "other"
    other.mkdir()
    (other / FACTS).write_text(json.dumps({**facts, "num_hidden_layers": 93}))
    with pytest.raises(RankFailedError, match="num_hidden_layers is 93 there and 7 here"):
        run_ranks(1, read_back, str(bf16), str(other), {"tp": 1})


def test_an_unfinished_directory_is_refused(bf16: Path) -> None:
    from k31core.checkpoint.torch_dist import read_facts

    with pytest.raises(TorchDistError, match="no finished torch_dist"):
        read_facts(bf16.parent / "nothing")


def test_a_torch_dist_of_another_checkpoint_of_the_same_sizes_is_refused(
    bf16: Path, converted: Path, tmp_path: Path
) -> None:
    """A fine-tune has the same names and shapes: only the fingerprint tells them apart."""
    from k31core.checkpoint.fingerprint import checkpoint_fingerprint

    assert json.loads((converted / FACTS).read_text())["source"] == checkpoint_fingerprint(CASE)
    run_ranks(1, read_back, str(bf16), str(converted), {"tp": 1}, str(CASE))
    other = mxfp4_copy(tmp_path)
    name = "language_model.model.embed_tokens.weight"
    change_byte(shard_of(other, name), name, 99)
    with pytest.raises(RankFailedError, match="made from another checkpoint of the same sizes"):
        run_ranks(1, read_back, str(bf16), str(converted), {"tp": 1}, str(other))


def test_a_second_conversion_into_the_same_directory(bf16: Path, converted: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    run_ranks(1, convert, str(bf16), str(converted), {"tp": 1})
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before
    other = tmp_path / "bf16"
    convert_to_bf16(k3_copy(tmp_path), other, workers=1)
    with pytest.raises(RankFailedError, match="holds the conversion of another checkpoint"):
        run_ranks(1, convert, str(other), str(converted), {"tp": 1})


@pytest.mark.slow
def test_kimi_k3_from_4_ranks_to_8(tmp_path: Path) -> None:
    """PP2 CP2 DP2 EP4: the recipe's PP8 CP2 EP8 as far as the tiny model's two KDA heads divide."""
    bf16, target = tmp_path / "bf16", tmp_path / "torch_dist"
    convert_to_bf16(k3_copy(tmp_path), bf16, workers=1)
    run_ranks(4, convert, str(bf16), str(target), {"tp": 2, "dp": 2, "ep": 4})
    layout = {"cp": 2, "pp": 2, "dp": 2, "ep": 4, "first_stage_layers": 4, "last_stage_layers": 3}
    names = run_ranks(8, read_back, str(bf16), str(target), layout)
    assert {name for rank in names for name in rank} == set(
        json.loads((bf16 / "model.safetensors.index.json").read_text())["weight_map"]
    )
