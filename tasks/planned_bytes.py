"""What a run will need on each card, host and on the save directory, from the plan: compared before anything loads."""

import json
import math
from pathlib import Path

from k31core.checkpoint.store import RunStore
from k31core.cluster.survey import ByteNeeds
from k31core.recipe.recipe import Recipe
from k31core.rollout.engines.sglang.adapter_files import expected_factors

ADAM_BYTES = 12
"""Of the saved optimizer state a parameter: fp32 master weight and two moments."""
SYNC_COPIES = 2
"""Published adapters that the run directory keeps."""
FILE_TRANSPORTS = ("in_process", "shared_files")


def planned_bytes(recipe: Recipe, model_dir: Path, store: RunStore) -> ByteNeeds:
    """Bytes a card, a host and the save directory must have for `recipe` on the checkpoint at `model_dir`.

    Cards and hosts are judged where the recipe trains on GPUs: the plan builds every rank on torch's meta device, which
    takes half a minute for 32 ranks. A checkpoint without `text_config` has no sizes: nothing is judged.
    """
    text = json.loads((model_dir / "config.json").read_bytes()).get("text_config")
    if text is None:
        return ByteNeeds()
    factors = expected_factors(text, recipe.train.lora)
    parameters = sum(math.prod(shape) for shape in factors.values())
    room = save_bytes(recipe, parameters, already=_saved_bytes(store.root / "adapters"))
    if recipe.train.device == "cpu":
        return ByteNeeds(save_free_bytes=room)
    from k31core.model.config import load_config
    from k31core.plan.plan import make_plan

    plan = make_plan(recipe, load_config(model_dir))
    return ByteNeeds(
        gpu_memory_bytes=max(rank.peak for rank in plan.ranks),
        host_memory_bytes=max(host.total for host in plan.hosts),
        save_free_bytes=room,
    )


def save_bytes(recipe: Recipe, parameters: int, *, already: int = 0) -> int:
    """Bytes of the saves and published adapters that lie side by side at most, less what is there `already`."""
    factor_bytes = 4 if recipe.model.dtype == "float32" else 2
    adapter = parameters * factor_bytes
    saved = adapter + (parameters * ADAM_BYTES if recipe.save.optimizer else 0)
    regular = recipe.num_rollout // recipe.save.keep_every if recipe.save.keep_every else 0
    saves = 0 if recipe.save.skip_saving else recipe.save.keep_last + regular + 1  # one is written before one goes
    published = SYNC_COPIES + 1 if recipe.sync.transport in FILE_TRANSPORTS else 0
    return max(0, saves * saved + published * adapter - already)


def _saved_bytes(adapters: Path) -> int:
    return sum(path.stat().st_size for path in adapters.rglob("*") if path.is_file())
