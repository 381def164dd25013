"""From a recipe to the embedded engine's options."""

from pathlib import Path

import torch

from k31core.model.build import LORA_TARGETS, LoraSpec
from k31core.recipe.recipe import Recipe
from k31core.rollout.engines.embedded.core import Limits
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


async def open_embedded(recipe: Recipe, model_dir: Path, base_digest: str | None = None) -> EmbeddedEngine:
    """Open the engine; see `EmbeddedEngine.open`."""
    return await EmbeddedEngine.open(model_dir, embedded_options(recipe, base_digest))


def embedded_options(recipe: Recipe, base_digest: str | None = None) -> EmbeddedOptions:
    """What the recipe says about the embedded engine; it computes on the trainer's kind of device."""
    engine, lora = recipe.rollout.engine, recipe.train.lora
    targets = LORA_TARGETS if lora.target_modules == "all-linear" else tuple(lora.target_modules)
    return EmbeddedOptions(
        limits=Limits(engine.max_concurrent_requests, engine.max_total_tokens, engine.prefill_chunk_tokens),
        lora=LoraSpec(lora.rank, lora.alpha, targets=targets, tie_gate_up=lora.tie_gate_up),
        dtype=_DTYPES[recipe.model.dtype],
        device=recipe.train.device,
        threads=engine.threads,
        row_multiple=engine.row_multiple,
        cuda_graphs=engine.cuda_graphs,
        base_digest=base_digest,
    )
