"""Layouts of two GPUs take the step that one GPU takes, through NCCL. Needs two GPUs; by hand."""

from dataclasses import replace

import pytest
import torch

from k31core.recipe.train import ParallelRecipe
from tests.parity.ranks import run_ranks
from tests.parity.step import Case, Outcome, take_step, worst_differences
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
    torch.bfloat16: {"loss": 2e-2, "grad_norm": 5e-2, "gradient": 0.2, "factor": 0.1},
}
"""BF16 has 8 bits of precision, and this random model multiplies a rounding by a hundred: the bound shows that nothing
is
missing or doubled, not more."""


@pytest.fixture(scope="module")
def references() -> dict[Case, Outcome]:
    return {}


@pytest.fixture(scope="module")
def gpu_cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("nccl"))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_gpus(name: str, dtype: torch.dtype, gpu_cases: Cases, references: dict[Case, Outcome]) -> None:
    case = replace(gpu_cases.case("k31"), dtype=dtype, cuda=True, recompute=True)
    key = replace(case, samples=())
    if key not in references:
        references[key] = run_ranks(1, take_step, case, ParallelRecipe(), backend="nccl")[0]
    outcomes = run_ranks(2, take_step, case, ParallelRecipe(**LAYOUTS[name]), backend="nccl")
    worst = worst_differences(outcomes, references[key])
    print(name, dtype, {k: f"{v:.1e}" for k, v in worst.items()}, flush=True)
    assert all(worst[k] <= TOLERANCE[dtype][k] for k in TOLERANCE[dtype]), worst
