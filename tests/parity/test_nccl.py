"""Layouts of two GPUs take the step that one GPU takes, through NCCL. Needs two GPUs; by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k31core.recipe.train import ParallelRecipe
from tests.parity.ranks import run_ranks
from tests.parity.step import take_steps, worst_differences
from tests.parity.test_layouts import Cases

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYOUTS = {
    "TP2": {"tp": 2},
    "TP2+SP-EP2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "CP2-EP2": {"cp": 2, "ep": 2},
    "PP2": {"pp": 2},
    "DP2-EP2": {"dp": 2, "ep": 2},
}
TOLERANCE = {
    torch.float32: {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-3, "factor": 1e-3},
    torch.bfloat16: {"loss": 3e-2},
}
"""This random model multiplies a rounding by two hundred, so in BF16 only the loss is compared."""


def test_two_gpus(tmp_path: Path) -> None:
    """All layouts in the same two processes: starting them costs more than the steps."""
    plain = Cases(tmp_path).case("k31")
    cases = {dtype: replace(plain, dtype=dtype, cuda=True, recompute=True) for dtype in TOLERANCE}
    one = [(case, ParallelRecipe()) for case in cases.values()]
    references = dict(zip(cases, run_ranks(1, take_steps, one, backend="nccl")[0], strict=True))
    names = [(dtype, name) for dtype in cases for name in LAYOUTS]
    two = [(cases[dtype], ParallelRecipe(**LAYOUTS[name])) for dtype, name in names]
    by_rank = run_ranks(2, take_steps, two, backend="nccl")
    failed = []
    for (dtype, name), outcomes in zip(names, zip(*by_rank, strict=True), strict=True):
        worst = worst_differences(list(outcomes), references[dtype])
        print(name, dtype, {key: f"{value:.1e}" for key, value in worst.items()}, flush=True)
        failed += [(name, dtype, worst)] if any(worst[k] > TOLERANCE[dtype][k] for k in TOLERANCE[dtype]) else []
    assert not failed
