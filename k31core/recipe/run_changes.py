"""What a resumed run may change in its recipe, and what would make it another run."""

from typing import Any

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import differing_fields
from k31core.recipe.recipe import Recipe

CHANGEABLE = (
    "description",
    "num_rollout",
    "save.",
    "observe.",
    "watchdog.",
    "eval.",
    "cluster.",
    "env.",
    "sync.",
    "train.parallel.",
    "train.max_tokens_per_gpu",
    "train.recompute",
    "train.logprob_chunk_tokens",
    "train.distributed_timeout_minutes",
    "rollout.engine.",
    "reward.workers",
)
"""Fields (prefixes end in a dot) that change how a run is executed, not what it computes up to rounding."""


def may_change(field: str) -> bool:
    """True when a resumed run may have another value in this dotted field."""
    return any(field.startswith(entry) if entry.endswith(".") else field == entry for entry in CHANGEABLE)


def refuse_changes(old: Recipe, new: Recipe, *, where: str) -> dict[str, tuple[Any, Any]]:
    """The fields that differ `{field: (old, new)}`. Raises RecipeError, listing all, when one may not change."""
    changed = differing_fields(old, new)
    refused = [field for field in changed if not may_change(field)]
    if refused:
        lines = [
            f"  {field}: {was!r} -> {now!r} ({'allowed' if may_change(field) else 'not allowed'})"
            for field, (was, now) in changed.items()
        ]
        raise RecipeError(
            f"{where} belongs to another recipe:\n" + "\n".join(lines) + "\nUse the old values to continue this run, "
            "or give another --run-id (train.lora.warm_start starts a new run from its adapter)."
        )
    return changed
