"""The canary's log-probs are the same on every rank of every layout."""

from pathlib import Path

import pytest
import torch

from k31core.checkpoint.adapter import AdapterConfig, load_adapter, write_adapter
from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import adapter_slots, base_slots
from k31core.parallel.groups import build_mesh
from k31core.parallel.mesh import SINGLE, stage_layers
from k31core.recipe.train import ParallelRecipe
from k31core.train.canary import score_sequence
from tests.model_cases import ReferenceModel, config_of, load_tensors, random_adapter, write_checkpoint
from tests.parity.ranks import run_ranks

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def scored(rank: int, world: int, directory: Path, fields: dict) -> list[float]:
    mesh = build_mesh(ParallelRecipe(**fields)) if world > 1 else SINGLE
    config = load_config(directory / "model")
    stages = stage_layers(config.num_hidden_layers, mesh.pp.size)
    build = Build(mesh=mesh, dtype=torch.float64, lora=LoraSpec(2, 4.0))
    decoder = Decoder(config, build, stages[mesh.pp.rank])
    NativeCheckpoint(directory / "model").load(base_slots(decoder), progress=False)
    load_adapter(directory / "adapter", adapter_slots(decoder), partial=True)
    return score_sequence(decoder, TOKENS, chunk=4)


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2, "cp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2, "ep": 2}],
    ids=["one process", "TP2-CP2", "PP2-DP2-EP2"],
)
def test_the_canary_is_the_same_everywhere(layout: dict, tmp_path: Path) -> None:
    raw = config_of(layers=4, mla=(2, 4), num_attention_heads=4, kda_heads=4)
    factors = random_adapter(raw, 2)
    write_checkpoint(tmp_path / "model", raw)
    write_adapter(tmp_path / "adapter", AdapterConfig(2, 4.0, None), factors)
    ids = torch.tensor(TOKENS)
    logits = ReferenceModel(raw, load_tensors(tmp_path / "model"), factors, scaling=2.0).logits(ids)
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
    for found in run_ranks(ParallelRecipe(**layout).world_size, scored, tmp_path, layout):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-5)
