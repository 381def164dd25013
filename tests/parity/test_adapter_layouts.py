"""An adapter saved by any layout is read by any other, and gathered whole, without a bit changed."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from k31core.checkpoint.adapter import (
    WEIGHTS_FILE,
    AdapterConfig,
    AdapterError,
    load_adapter,
    write_adapter,
    write_adapter_together,
)
from k31core.checkpoint.tensor_file import TensorFile
from k31core.model.build import Build, LoraSpec
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.model.lora import adapter_shapes
from k31core.model.weight_names import adapter_slots
from k31core.parallel.groups import build_mesh, destroy_mesh, first_complaint
from k31core.parallel.mesh import SINGLE, Mesh, stage_layers
from k31core.parallel.ownership import gather_buckets, owned
from k31core.recipe.train import ParallelRecipe
from tests.model_cases import config_of, random_adapter
from tests.parity.ranks import run_ranks

RAW = config_of(layers=6, mla=(2, 6), num_attention_heads=4, kda_heads=4)
SETTINGS = AdapterConfig(3, 6.0, None)
LORA = LoraSpec(3, 6.0)
OF_4_RANKS = [
    {"tp": 4},
    {"tp": 2, "ep": 2, "cp": 2},
    {"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1},
    {"pp": 2, "tp": 2, "ep": 2, "sequence_parallel": True},
    {"dp": 4, "ep": 4},
    {"cp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "cp": 2, "ep": 2},
]


def decoder_of(layout: ParallelRecipe, mesh: Mesh) -> Decoder:
    config = parse_config(RAW)
    stages = stage_layers(config.num_hidden_layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)
    return Decoder(config, Build(mesh=mesh, lora=LORA), stages[mesh.pp.rank])


def rewrite(rank: int, world: int, start: Path, layouts: list[dict], out: Path) -> dict[str, np.ndarray]:
    """Load with the first layout, save; load that with the next, save; and so on. Returns the last one gathered."""
    shapes = adapter_shapes(parse_config(RAW), LORA)
    source = start
    gathered: dict[str, np.ndarray] = {}
    for number, fields in enumerate(layouts):
        layout = ParallelRecipe(**fields)
        mesh = build_mesh(layout)
        slots = adapter_slots(decoder_of(layout, mesh))
        load_adapter(source, slots, partial=True)
        source = out / str(number)
        write_adapter_together(
            source,
            SETTINGS,
            shapes,
            owned(slots, mesh),
            dtype=torch.float32,
            first=rank == 0,
            agree=first_complaint,
        )
        if number == len(layouts) - 1:
            cpu = torch.device("cpu")
            for bucket in gather_buckets(shapes, slots, mesh, dtype=torch.float32, device=cpu, bucket_bytes=40_000):
                assert sum(t.nbytes for _, t in bucket) <= 40_000 or len(bucket) == 1
                gathered |= {name: tensor.numpy().copy() for name, tensor in bucket}
        destroy_mesh()
    return gathered


def check(start: Path, out: Path, results: list[dict[str, np.ndarray]], original: dict[str, torch.Tensor]) -> None:
    written = sorted(out.iterdir())
    assert written
    for directory in written:
        with TensorFile(directory / WEIGHTS_FILE) as file:
            assert set(file.entries) == set(original)
            for name, tensor in original.items():
                assert file.read(name).numpy().tobytes() == tensor.numpy().tobytes(), (directory.name, name)
        assert (directory / "adapter_config.json").read_bytes() == (start / "adapter_config.json").read_bytes()
    for gathered in results:
        assert {name: array.tobytes() for name, array in gathered.items()} == {
            name: tensor.numpy().tobytes() for name, tensor in original.items()
        }


def run(tmp_path: Path, layouts: list[dict], seed: int) -> None:
    original = random_adapter(RAW, 3, seed=seed)
    next(iter(original.values()))[0, 0] = -0.0  # bits, not values
    write_adapter(tmp_path / "start", SETTINGS, original)
    (tmp_path / "out").mkdir()
    world = ParallelRecipe(**layouts[0]).world_size
    results = run_ranks(world, rewrite, tmp_path / "start", layouts, tmp_path / "out")
    check(tmp_path / "start", tmp_path / "out", results, original)


def test_a_chain_of_layouts(tmp_path: Path) -> None:
    run(tmp_path, OF_4_RANKS, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_pairs(seed: int, tmp_path: Path) -> None:
    run(tmp_path, random.Random(seed).sample(OF_4_RANKS, 2), seed)


def fail_to_write(rank: int, world: int, out: Path) -> str:
    layout = ParallelRecipe(tp=2)
    mesh = build_mesh(layout)
    slots = adapter_slots(decoder_of(layout, mesh))
    if rank == 1:
        slots[-1].tensor.data[0, 0] = float("nan")
        slots = [slots[-1]]
    try:
        write_adapter_together(
            out,
            SETTINGS,
            adapter_shapes(parse_config(RAW), LORA),
            slots,
            dtype=torch.float32,
            first=rank == 0,
            agree=first_complaint,
        )
    except AdapterError as error:
        return str(error)
    return ""


def test_one_ranks_fault_is_everybodys_error(tmp_path: Path) -> None:
    messages = run_ranks(2, fail_to_write, tmp_path / "out")
    assert messages[0] == messages[1] and "nan at index (0, 0)" in messages[0]


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    slots = adapter_slots(decoder_of(ParallelRecipe(), SINGLE))
    write_adapter(tmp_path / "start", SETTINGS, random_adapter(RAW, 3))
    load_adapter(tmp_path / "start", slots)
    shapes = adapter_shapes(parse_config(RAW), LORA)
    cpu = torch.device("cpu")
    gathered = dict(pair for b in gather_buckets(shapes, slots, SINGLE, dtype=torch.float32, device=cpu) for pair in b)
    assert all(torch.equal(gathered[slot.name], slot.tensor) for slot in slots)
