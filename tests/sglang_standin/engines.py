"""The SGLang engine over the stand-in, as the contract suite opens engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from k31core.model.build import LoraSpec
from k31core.recipe.load import load_recipe, resolve
from k31core.rollout.engine import Engine
from k31core.rollout.engines.embedded.core import Limits
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from k31core.rollout.engines.sglang.open import open_sglang
from tests.contract.engine_cases import ALPHA, LIMITS, MODEL, RANK
from tests.sglang_standin.server import Standin, serving


def recipe_overrides(urls: list[str], limits: Limits) -> list[str]:
    """The tiny recipe, served by `urls`."""
    return [
        "rollout.engine.kind=sglang",
        f"rollout.engine.server_urls={urls}",
        f"rollout.engine.max_total_tokens={limits.max_total_tokens}",
        f"rollout.engine.max_concurrent_requests={limits.max_concurrent_requests}",
        "rollout.engine.lora_base_cpu_backup=true",
        f"train.lora.rank={RANK}",
        f"train.lora.alpha={ALPHA}",
        "cluster.colocate=false",
    ]


@asynccontextmanager
async def over_http(limits: Limits = LIMITS, *, nested: bool = False) -> AsyncIterator[Engine]:
    """Our client, a real HTTP server, the embedded engine behind it."""
    lora = LoraSpec(RANK, ALPHA)
    inner = await EmbeddedEngine.open(MODEL, EmbeddedOptions(limits, lora))
    try:
        async with serving(Standin(inner, lora, nested=nested)) as url:
            engine = await open_sglang(resolve(load_recipe("tiny", recipe_overrides([url], limits))), MODEL)
            try:
                yield engine
            finally:
                await engine.close()
    finally:
        await inner.close()


over_http_nested = partial(over_http, nested=True)
"""As an SGLang before 0.5.22 answers."""
