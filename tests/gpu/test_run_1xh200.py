"""The measurement of `k31-1xh200`, shrunken, on a CPU: every line of it but the captured graphs."""

import asyncio
import math
from pathlib import Path

import pytest

from k31core.model.config import load_config
from k31core.recipe.load import load_recipe
from k31core.recipe.model import RandomCheckpoint
from tests.gpu.run_1xh200 import measure
from tests.gpu.shrunken import SHRUNKEN


def test_real_head_geometry_and_expert_shapes() -> None:
    """What the recipe scales is layers and experts; every width is the published one."""
    from k31core.convert.random_checkpoint import random_config
    from k31core.model.config import parse_config
    from k31core.model.sizes import KIMI_K31

    config = parse_config(random_config(load_recipe("k31-1xh200").model.random or RandomCheckpoint(), "kimi_k31"))
    scaled = {"num_hidden_layers", "mla_layers", "num_experts", "attn_res_block_size"}
    differing = {name for name in config.__slots__ if getattr(config, name) != getattr(KIMI_K31, name)}
    assert differing == scaled
    assert (config.num_hidden_layers, config.num_experts, config.mla_layers) == (8, 896 // 8, (3, 7))


def test_phases_run_and_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("k31-1xh200", SHRUNKEN)
    results = asyncio.run(measure(recipe, tmp_path, 1, profile=False))
    for row in results["steps"]:
        assert row["rollout"]["generated_tokens"] == 2 * 4 * 12
        assert row["train"]["tokens"] == 2 * 4 * (24 + 12)
        assert row["train"]["grad_norm"] > 0 and math.isfinite(row["train"]["grad_norm"])
        assert row["rollout"]["tflops_per_s"] > 0 and row["train"]["tflops_per_s"] > 0
        assert row["train"]["logprob_abs_diff"] < 0.05  # bfloat16 on both sides
        assert row["rollout"]["decode_graphs"] == 0
    assert load_config(tmp_path / "scaled-k31").num_experts == 8
    assert "step 1 train: " in capsys.readouterr().out
