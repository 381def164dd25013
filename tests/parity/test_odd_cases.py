"""Shapes that a layout is not made for: idle experts and ranks, a sequence over several chunks, odd counts; in fp64."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k31core.checkpoint.adapter import AdapterConfig, write_adapter
from k31core.model.config import parse_config
from k31core.recipe.train import ParallelRecipe
from tests.model_cases import config_of, random_adapter, write_checkpoint
from tests.parity.ranks import run_ranks
from tests.parity.step import ALPHA, RANK, Case, random_samples, take_step, worst_differences

TOLERANCE = {"loss": 1e-12, "grad_norm": 1e-7, "gradient": 1e-6, "factor": 1e-6}
WIDE = {"intermediate_size": 96, "num_shared_experts": 3}
"""Widths that three TP ranks divide."""


@dataclass(frozen=True)
class Odd:
    """A model, a layout, and (prompt, response) tokens; one masked sample is added."""

    layout: dict[str, Any]
    lengths: list[tuple[int, int]]
    model: dict[str, Any] = field(default_factory=dict)
    tokens_per_gpu: int = 64
    few_experts: bool = False
    """Every token goes to the same experts, so most experts (and with EP most ranks) get none."""
    replay: bool = True
    replay_keys: bool = False
    recompute: bool = False


CASES = {
    "experts and ranks without a token": Odd(
        {"dp": 3, "ep": 3},
        [(2, 4)],
        {"num_experts": 6, "num_experts_per_token": 2},
        few_experts=True,
    ),
    "one sequence over every chunk": Odd(
        {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "sequence_parallel": True, "last_stage_layers": 1},
        [(7, 31), (1, 1)],
        {"layers": 5, "mla": (1, 4, 5), "attn_res_block_size": 3},
        tokens_per_gpu=19,
        replay_keys=True,
        recompute=True,
    ),
}
SLOW_CASES = {
    "TP3-CP2, three heads a rank pair": Odd(
        {"tp": 3, "cp": 2, "ep": 6, "sequence_parallel": True},
        [(1, 1), (5, 12), (9, 2)],
        {**WIDE, "num_experts": 6, "num_attention_heads": 6, "kda_heads": 12, "layers": 3, "mla": (2,)},
    ),
    "CP3, two-token sequences only": Odd(
        {"cp": 3, "dp": 2, "ep": 3},
        [(1, 1)] * 9 + [(1, 2)],
        {"num_experts": 6, "num_attention_heads": 3, "kda_heads": 3, "index_topk": 2},
        tokens_per_gpu=3,
        replay=False,
    ),
    "more ranks than samples, every layer MLA but one": Odd(
        {"dp": 4, "ep": 4, "cp": 2}, [(3, 5)], {"layers": 4, "mla": (1, 2, 4)}, replay=False
    ),
    "PP3, one layer a stage at the ends": Odd(
        {"pp": 3, "tp": 2, "first_stage_layers": 1, "last_stage_layers": 1},
        [(5, 9), (1, 12), (2, 2)],
        {"layers": 4, "mla": (1, 4), "attn_res_block_size": 5, "first_k_dense_replace": 2},
        tokens_per_gpu=14,
        recompute=True,
    ),
    "K3, snapshots in every layer, no dense layer": Odd(
        {"tp": 2, "cp": 2, "dp": 2, "ep": 8, "sequence_parallel": True},
        [(1, 1), (2, 12), (7, 31)],
        {"k31": False, "attn_res_block_size": 1, "first_k_dense_replace": 0, "num_experts_per_token": 1},
        few_experts=True,
        recompute=True,
    ),
    "EP beside CP3": Odd({"cp": 3, "dp": 2, "ep": 2}, [(2, 5), (9, 6)], {"num_attention_heads": 6, "kda_heads": 3}),
}


def made_case(odd: Odd, directory: Path) -> Case:
    """The checkpoint, adapter and samples of an odd case."""
    sizes = {"layers": 4, "mla": (2, 4), "num_attention_heads": 4, "kda_heads": 4, "attn_res_block_size": 2}
    raw = config_of(**{**sizes, **odd.model})
    write_checkpoint(directory / "model", raw)
    write_adapter(directory / "adapter", AdapterConfig(RANK, ALPHA, None), random_adapter(raw, RANK))
    samples = random_samples(parse_config(raw), [*odd.lengths, (2, 2)])
    if odd.few_experts:
        first = np.arange(raw["text_config"]["num_experts_per_token"], dtype=np.int16)
        samples = tuple(replace(s, routing=np.broadcast_to(first, s.routing.shape).copy()) for s in samples)
    return Case(
        directory / "model",
        directory / "adapter",
        samples,
        tokens_per_gpu=odd.tokens_per_gpu,
        recompute=odd.recompute,
        dtype=torch.float64,
        replay=odd.replay,
        replay_keys=odd.replay_keys,
    )


def check(odd: Odd, directory: Path) -> None:
    """The layout's step equals that of one process with everything in one microbatch."""
    case, parallel = made_case(odd, directory), ParallelRecipe(**odd.layout)
    whole = replace(case, recompute=False, tokens_per_gpu=256)
    reference = run_ranks(1, take_step, whole, ParallelRecipe())[0]
    worst = worst_differences(run_ranks(parallel.world_size, take_step, case, parallel), reference)
    assert all(worst[key] <= TOLERANCE[key] for key in TOLERANCE), worst


@pytest.mark.parametrize("name", CASES)
def test_odd_case(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_every_odd_case(name: str, tmp_path: Path) -> None:
    check(SLOW_CASES[name], tmp_path)
