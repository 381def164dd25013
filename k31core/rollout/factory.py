"""The engine that a recipe asks for. Torch and SGLang are imported only when that engine is built."""

from pathlib import Path

from k31core.recipe.load import ResolvedRecipe
from k31core.rollout.engine import Engine


async def build_engine(
    resolved: ResolvedRecipe, model_dir: Path, *, base_digest: str | None = None, log_dir: Path | None = None
) -> Engine:
    """Open the engine of `resolved` on the checkpoint at `model_dir`; it serves the base until an adapter is loaded.

    `base_digest` is the base's identity: an adapter whose manifest names another one is refused. `log_dir`: where a
    server's log goes. Raises ValueError subclasses for a checkpoint that cannot be used, EngineError when the engine
    does not come up.
    """
    if resolved.recipe.rollout.engine.kind == "embedded":
        from k31core.rollout.engines.embedded.from_recipe import open_embedded

        return await open_embedded(resolved.recipe, model_dir, base_digest)
    from k31core.rollout.engines.sglang.open import open_sglang

    return await open_sglang(resolved, model_dir, log_dir)
