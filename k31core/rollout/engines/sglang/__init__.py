"""The engine behind which SGLang generates: launched from the recipe, spoken to over HTTP."""

from k31core.rollout.engines.sglang.open import open_sglang

__all__ = ["open_sglang"]
