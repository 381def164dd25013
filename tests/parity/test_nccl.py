"""Layouts of two GPUs take the step that one GPU takes, through NCCL. Needs two GPUs; by hand:

    pytest -m multigpu -s tests/parity/test_nccl.py

A line a layout as it ends; the two processes are ended after `LIMIT_S`, whatever they wait for.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k31core.parallel.groups import destroy_mesh
from k31core.recipe.train import ParallelRecipe
from tests.gpu.tuning import few_candidates
from tests.parity.ranks import run_ranks
from tests.parity.step import Case, Outcome, take_step, worst_differences
from tests.parity.test_layouts import Cases

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LIMIT_S = 170.0
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


def every_step(rank: int, world: int, cases: list[Case]) -> list[list[Outcome]]:
    """For each case: the outcome of one process on this rank's own GPU, then of every layout."""
    with few_candidates():
        return _every_step(rank, world, cases)


def _every_step(rank: int, world: int, cases: list[Case]) -> list[list[Outcome]]:
    begun = time.monotonic()

    def say(*words: object) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - begun:6.1f} s]", *words, flush=True)

    outcomes = []
    for case in cases:
        alone = take_step(rank, 1, case, ParallelRecipe())
        say(case.dtype, "one GPU", alone.metrics["train/loss"])
        outcomes.append([alone])
        for name, fields in LAYOUTS.items():
            outcomes[-1].append(take_step(rank, world, case, ParallelRecipe(**fields)))
            destroy_mesh()
            say(case.dtype, name, outcomes[-1][-1].metrics["train/loss"])
    return outcomes


def compared(cases: list[Case], by_rank: list[list[list[Outcome]]]) -> list[str]:
    """What is too far from one process, in words."""
    failed = []
    for number, case in enumerate(cases):
        for at, name in enumerate(LAYOUTS, start=1):
            found = [outcomes[number][at] for outcomes in by_rank]
            worst = worst_differences(found, by_rank[0][number][0])
            print(name, case.dtype, {key: f"{value:.1e}" for key, value in worst.items()}, flush=True)
            bound = TOLERANCE[case.dtype]
            failed += [f"{name} {case.dtype}: {worst}"] if any(worst[key] > bound[key] for key in bound) else []
    return failed


def test_two_gpus(tmp_path: Path) -> None:
    """All layouts in the same two processes: starting them costs more than the steps."""
    plain = Cases(tmp_path).case("k31")
    cases = [replace(plain, dtype=dtype, cuda=True, recompute=True) for dtype in TOLERANCE]
    assert not compared(cases, run_ranks(2, every_step, cases, backend="nccl", timeout=LIMIT_S))
