"""Requests, adapters and comparisons for the engine contract suite."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.adapter import load_adapter
from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.weight_names import adapter_slots, base_slots
from k31core.rl.types import Completion, GenerateRequest, SamplingParams
from k31core.rollout.engine import Engine
from k31core.rollout.engines.embedded.core import Limits
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions

CASES = Path(__file__).parents[1] / "cases" / "model"
MODEL, ADAPTER = CASES / "tiny-k31", CASES / "tiny-k31-adapter"
RANK, ALPHA, VOCAB, STOP = 4, 8.0, 96, 2
LIMITS = Limits(max_concurrent_requests=16, max_total_tokens=4096, prefill_chunk_tokens=2048)


@asynccontextmanager
async def embedded(limits: Limits = LIMITS) -> AsyncIterator[Engine]:
    """The embedded engine on the known-answer checkpoint."""
    engine = await EmbeddedEngine.open(MODEL, EmbeddedOptions(limits, LoraSpec(RANK, ALPHA)))
    try:
        yield engine
    finally:
        await engine.close()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """A fixed random prompt."""
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def request(name: str, tokens: tuple[int, ...], *, version: int = -1, **params: object) -> GenerateRequest:
    """A request with everything recorded; `params` override the sampling."""
    defaults: dict[str, object] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": 12,
        "stop_token_ids": (STOP,),
        "seed": sum(name.encode()) * 7919,
        "top_logprobs_num": 8,
        "return_routing": True,
    }
    return GenerateRequest(name, tokens, SamplingParams(**(defaults | params)), version)  # type: ignore[arg-type]


def mixed_requests(version: int = -1) -> list[GenerateRequest]:
    """Groups that share a prompt, prompts of many lengths (some over a cache block), long and short answers."""
    groups = [(0, 3, 8), (1, 17, 12), (2, 64, 6), (3, 65, 6), (4, 150, 12), (5, 1, 5)]
    return [
        request(f"g{group}-s{sample}", prompt(group, length), version=version, max_new_tokens=count)
        for group, length, count in groups
        for sample in range(2)
    ]


async def generate_all(engine: Engine, requests: list[GenerateRequest]) -> dict[str, Completion]:
    """All requests at once."""
    done = await asyncio.gather(*(engine.generate(r) for r in requests))
    return {completion.request_id: completion for completion in done}


def assert_same(a: Completion, b: Completion) -> None:
    """Equal to the last bit."""
    assert a.request_id == b.request_id and a.finish == b.finish and a.policy_version == b.policy_version
    for field in ("tokens", "logprobs", "top_ids", "top_logprobs", "routing"):
        left, right = getattr(a, field), getattr(b, field)
        assert left.dtype == right.dtype and np.array_equal(left, right), f"{a.request_id}: {field} differs"


def trainer_model(adapter: Path | None) -> Decoder:
    """The trainer's decoder in fp32."""
    decoder = Decoder(load_config(MODEL), Build(lora=LoraSpec(RANK, ALPHA)))
    NativeCheckpoint(MODEL).load(base_slots(decoder))
    if adapter is not None:
        load_adapter(adapter, adapter_slots(decoder))
    return decoder


@torch.no_grad()
def trainer_view(decoder: Decoder, asked: GenerateRequest, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs `[R, V]` at the request's temperature, routing `[P + R - 1, L, k]`) by one packed forward."""
    tokens = torch.tensor([*asked.tokens, *completion.tokens.tolist()])
    hidden, routing = decoder.forward_captured(Packed(tokens, torch.tensor([0, len(tokens)])))
    logits = decoder.logits(hidden) / (asked.params.temperature or 1.0)
    logprobs = torch.log_softmax(logits, dim=-1)[len(asked.tokens) - 1 : -1]
    return logprobs.numpy(), routing[:-1].numpy()


def changed_adapter(target: Path, *, config: dict[str, object] | None = None, edit: object = None) -> Path:
    """A copy of the case's adapter with fields of its config replaced and `edit(tensors)` applied."""
    shutil.copytree(ADAPTER, target)
    if config:
        path = target / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if edit is not None:
        tensors = load_file(target / "adapter_model.safetensors")
        edit(tensors)  # type: ignore[operator]
        save_file(tensors, target / "adapter_model.safetensors")
    return target
