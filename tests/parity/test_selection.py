"""DSA selects the same keys on every rank, with more keys than it takes, and where scores are equal."""

from pathlib import Path

import numpy as np
import pytest
import torch

from k31core.checkpoint.native import NativeCheckpoint, write_native_checkpoint
from k31core.model.build import Build
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.mla import MlaAttention
from k31core.model.weight_names import base_slots
from k31core.parallel.groups import build_mesh
from k31core.parallel.mesh import SINGLE
from k31core.recipe.train import ParallelRecipe
from tests.model_cases import config_of, random_tensors
from tests.parity.ranks import run_ranks

TOKENS, BOUNDS, TOPK = 32, [0, 19, 32], 5


class _Recording(MlaAttention):
    """Keeps what it selected."""

    def select(self, *arguments: torch.Tensor | None) -> torch.Tensor:
        self.chosen = super().select(*arguments)
        return self.chosen


def selected(rank: int, world: int, model: Path, fields: dict) -> tuple[int, int, list[np.ndarray]]:
    """(TP rank, CP rank, selection of each MLA layer for this rank's queries)."""
    mesh = build_mesh(ParallelRecipe(**fields)) if world > 1 else SINGLE
    decoder = Decoder(load_config(model), Build(mesh=mesh))
    NativeCheckpoint(model).load(base_slots(decoder), progress=False)
    attentions = [layer.self_attn for layer in decoder.layers.values() if isinstance(layer.self_attn, MlaAttention)]
    for attention in attentions:
        attention.__class__ = _Recording
    start, length = mesh.cp.slice_of(TOKENS, "tokens")
    tokens = (torch.arange(TOKENS) * 7 % 96)[start : start + length]
    with torch.no_grad():
        decoder(Packed(tokens, torch.tensor(BOUNDS)))
    return mesh.tp.rank, mesh.cp.rank, [attention.chosen.numpy() for attention in attentions]


@pytest.mark.parametrize("ties", [False, True], ids=["scores", "ties"])
def test_every_rank_selects_the_same(ties: bool, tmp_path: Path) -> None:
    raw = config_of(layers=4, mla=(2, 4), num_attention_heads=4, kda_heads=4, index_topk=TOPK)
    tensors = random_tensors(raw)
    if ties:  # every index key is the same
        tensors = {n: torch.zeros_like(t) if "indexer.wk." in n else t for n, t in tensors.items()}
    write_native_checkpoint(tmp_path / "model", raw, iter(tensors.items()), 1 << 30)
    ((_, _, whole),) = run_ranks(1, selected, tmp_path / "model", {})
    layout = {"tp": 2, "cp": 2, "ep": 4, "sequence_parallel": True}
    for _, cp, parts in run_ranks(4, selected, tmp_path / "model", layout):
        for part, full in zip(parts, whole, strict=True):
            assert np.array_equal(part, full[cp * 16 : (cp + 1) * 16])
    for full in whole:
        assert (full >= 0).sum(1).max() == TOPK and TOPK < 19
        if ties:  # keys that do not differ: the newest ones win
            last = full[18]
            assert last.tolist() == [14, 15, 16, 17, 18]
