"""Rollout: how many samples, how they are drawn, and the engine that draws them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section


class DynamicSampling(Section):
    """Drop groups whose rewards are all equal and draw more until enough are left (DAPO)."""

    refill_groups: int = Field(4, ge=1)
    """Groups drawn at a time."""
    max_refills: int = Field(16, ge=1)
    """Refills in one step before the run stops and says what the groups looked like."""


class EngineRecipe(Section):
    """The engine that generates. `embedded` is ours, on one machine; `sglang` launches or joins a server."""

    kind: Literal["embedded", "sglang"]
    max_concurrent_requests: int = Field(64, ge=1)
    """Requests in flight at one engine."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine (part of the recipe: bits depend on it)."""
    row_multiple: int = Field(8, ge=1)
    """Rows of every matrix product are padded to a multiple of this, so a result does not depend on its batch."""
    cuda_graphs: bool = False
    """The embedded engine on a GPU replays captured decoding steps; on a CPU this changes nothing."""
    prefill_chunk_tokens: int = Field(2048, ge=1)
    max_total_tokens: int = Field(262144, ge=1)
    """Tokens in the KV cache, per attention-DP group."""
    tp_size: int = Field(1, ge=1)
    ep_size: int = Field(1, ge=1)
    attn_dp_size: int = Field(1, ge=1)
    """Attention data-parallel groups inside one engine; each has its own KV budget of `max_total_tokens`."""
    moe_runner_backend: str | None = None
    """`marlin` for MXFP4 experts; None leaves this and the three below to the server."""
    lora_backend: str | None = None
    kv_cache_dtype: str | None = None
    load_balance_method: str | None = None
    """How requests are spread over the attention-DP groups."""
    lora_base_cpu_backup: bool = True
    """Keep a host copy of the frozen base, so that a sync sends only the adapter."""
    mem_fraction_static: float | None = Field(None, gt=0.0, lt=1.0)
    startup_timeout_s: float = Field(3600.0, gt=0)
    """Time until the engine answers, whoever started it."""
    request_timeout_s: float = Field(3600.0, gt=0)
    request_retries: int = Field(2, ge=0)
    """Times a request is sent again after a lost connection or a 5xx answer; its first result counts, once."""
    host: str = "127.0.0.1"
    """Address the servers listen on. An engine that spans machines listens on its first node's address instead of
    loopback."""
    port: int = Field(30000, ge=1024, le=65000)
    """HTTP port of the first engine; engine i takes `port + 100 i`."""
    server_urls: tuple[str, ...] = ()
    """Servers that already run, one per engine (`http://node:30000`): joined, never started or stopped."""
    python: str | None = None
    """Interpreter that runs the server (SGLang pins other versions than we do); None is this one."""
    sglang_path: str | None = None
    """Folder with the `sglang` package, put first on the server's PYTHONPATH; None takes the installed one."""
    extra_args: tuple[str, ...] = ()
    """Appended to the server's command line, as they are."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "embedded" and self.tp_size * self.ep_size * self.attn_dp_size != 1:
            raise ValueError("rollout.engine: the embedded engine is one process; tp_size, ep_size, attn_dp_size are 1")
        if self.tp_size % self.attn_dp_size:
            raise ValueError(f"rollout.engine.attn_dp_size {self.attn_dp_size} does not divide tp_size {self.tp_size}")
        if self.tp_size % self.ep_size:
            raise ValueError(f"rollout.engine.ep_size {self.ep_size} does not divide tp_size {self.tp_size}")
        return self


class RolloutRecipe(Section):
    """One rollout: `prompts_per_step` groups of `samples_per_prompt` answers."""

    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    temperature: float = Field(1.0, gt=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 is off."""
    max_response_tokens: int = Field(3072, ge=1)
    dynamic_sampling: DynamicSampling | None = None
    top_logprobs_num: int = Field(128, ge=0)
    """Candidates recorded for each sampled token (K of score centering)."""
    routing_replay: bool = True
    """R3: the trainer replays the engine's expert choices."""
    indexer_replay: bool = False
    """The trainer replays the engine's DSA selection as well (kimi_k31 only): off, the trainer selects from its own
    indexer scores. At full size a token's selection is 24 x 2048 positions: 196 KB as SGLang sends it, about 10 KB
    as recorded."""
    engine: EngineRecipe
    token_budget_tokens: int | None = Field(None, ge=1)
    """Upper bound on generated tokens of one step, None for no bound."""

    @property
    def unfiltered(self) -> bool:
        """True when every token of the vocabulary can be drawn (score centering's `selected` candidates)."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples_per_prompt < 2:
            raise ValueError(
                "rollout.samples_per_prompt is 1: a group of one has no baseline, its advantage is always 0; "
                "use 2 or more"
            )
        return self
