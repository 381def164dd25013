"""What must hold between our trainer and an SGLang server on the same card: run by `run_sglang.py` on a GPU, and by
`tests/unit/sglang/test_sglang_checks.py` with the stand-in on the CPU, so that the script itself is known to run.

Every check gets a `Pair` and returns what it measured; an AssertionError or any other error is its failure.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.model.decoder import Packed
from k31core.recipe.load import load_recipe, resolve
from k31core.recipe.recipe import Recipe
from k31core.rl.types import Completion, FinishReason, GenerateRequest, SamplingParams
from k31core.rollout.engine import AdapterRefusedError, EngineError, StaleVersionError
from k31core.rollout.engines.sglang.engine import SglangEngine
from k31core.rollout.engines.sglang.open import open_sglang
from k31core.sync.handle_publisher import HandlePublisher, Handles, Released
from k31core.workers.train import TrainWorker
from tests.model_cases import config_of, random_adapter, write_checkpoint

RANK, ALPHA = 8, 16
TARGETS = ("experts",)
"""All that a mended 0.5.17 serves on Kimi-K3."""
REAL = {
    "hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 4096, "num_attention_heads": 8, "q_lora_rank": 256,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 16,
    "num_experts_per_token": 4, "moe_intermediate_size": 256, "routed_expert_hidden_size": 512,
    "attn_res_block_size": 2, "routed_scaling_factor": 2.5, "kda_heads": 8,
}  # fmt: skip
"""The published head geometry (128-wide heads, 512 + 64 latent), everything else small."""


@dataclass(slots=True)
class Pair:
    """Trainer and engine on one checkpoint."""

    trainer: TrainWorker
    engine: SglangEngine
    recipe: Recipe
    model: Path
    scratch: Path
    tolerance: float
    """Largest difference of a log-prob."""
    version: int = -1


def write_model(directory: Path, *, small: bool) -> Path:
    """A random Kimi-K3 checkpoint with MXFP4 experts: real head geometry, or (small) a size for the CPU."""
    sizes: dict[str, Any] = {} if small else dict(REAL)
    raw = config_of(layers=4, mla=(4,), k31=False, **sizes)
    text = raw["text_config"]
    if not small:
        text["linear_attn_config"]["head_dim"] = 128
    # beside the published names, SGLang wants these
    text["n_shared_experts"], text["num_experts_per_tok"] = text["num_shared_experts"], text["num_experts_per_token"]
    text |= {"head_dim": text["qk_nope_head_dim"] + text["qk_rope_head_dim"], "rope_theta": 10000.0}
    raw |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "media_placeholder_token_id": 3}
    raw["vision_config"] = {
        "model_type": "kimi_k3_vision", "vt_num_hidden_layers": 1, "vt_hidden_size": 128, "vt_intermediate_size": 256,
        "vt_num_attention_heads": 2, "qkv_hidden_size": 128, "text_hidden_size": text["hidden_size"],
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(directory, raw, shard_bytes=1 << 30)


def write_adapter(directory: Path, model: Path, seed: int, *, rank: int = RANK, spoil: bool = False) -> Path:
    """A random adapter on the experts; `spoil`: one value is not a number."""
    raw = json.loads((model / "config.json").read_text())
    tensors = {k: v.clone() for k, v in random_adapter(raw, rank, seed, tied=True).items() if ".experts." in k}
    for name in [n for n in tensors if n.endswith("w3.lora_A.weight")]:
        tensors[name] = tensors[name.replace("w3", "w1")].clone()
    if spoil:
        next(iter(tensors.values())).view(-1)[3] = torch.nan
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": float(ALPHA), "lora_dropout": 0.0, "bias": "none",
        "task_type": "CAUSAL_LM", "target_modules": list(TARGETS), "experts_shared_outer_loras": True,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def recipe_for(site: Path, *, card: bool, port: int, overrides: tuple[str, ...] = ()) -> Recipe:
    """One engine and one trainer rank; `card`: on a GPU, in BF16, with the options that a mended 0.5.17 needs."""
    plain = [
        "rollout.engine.kind=sglang",
        f"rollout.engine.sglang_path={site}",
        f"rollout.engine.port={port}",
        "rollout.engine.startup_timeout_s=400",
        "rollout.engine.request_timeout_s=200",
        "rollout.max_response_tokens=32",
        "rollout.top_logprobs_num=8",
        f"train.lora.rank={RANK}",
        f"train.lora.alpha={ALPHA}",
        f"train.lora.target_modules={list(TARGETS)}",
        "sync.transport=cuda_ipc",
        "sync.expert_rows=all",
        "cluster.colocate=true",
    ]
    on_card = [
        "model.dtype=bfloat16",
        "train.device=cuda",
        "cluster.gpus_per_node=1",
        "rollout.engine.moe_runner_backend=marlin",
        "rollout.engine.lora_backend=triton",
        "rollout.engine.mem_fraction_static=0.4",
        "rollout.engine.extra_args=['--attention-backend','triton','--sampling-backend','pytorch','--grammar-backend',"
        "'none','--cuda-graph-backend-decode','disabled','--cuda-graph-backend-prefill','disabled',"
        "'--max-running-requests','8','--context-length','2048','--disable-radix-cache','--skip-server-warmup',"
        "'--max-mamba-cache-size','64','--watchdog-timeout','600']",
    ]
    return load_recipe("k3-tiny", ["model.ref_load=native", *plain, *(on_card if card else []), *overrides])


async def open_pair(recipe: Recipe, model: Path, scratch: Path, *, tolerance: float) -> Pair:
    """The trainer first, then the server, as a run starts them."""
    trainer = TrainWorker(recipe.model_dump_json(), str(scratch), str(model), 0, 1, "")
    trainer.start()
    trainer.restore(str(write_adapter(scratch / "adapter-a", model, seed=11)))
    engine = await open_sglang(resolve(recipe), model, scratch / "logs")
    return Pair(trainer, engine, recipe, model, scratch, tolerance)


def request(name: str, length: int, *, version: int, count: int = 16, **params: Any) -> GenerateRequest:
    """A fixed random prompt."""
    tokens = np.random.default_rng(length).integers(4, 90, length)
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": count, "seed": length}
    values |= {"stop_token_ids": (), "top_logprobs_num": 8, "return_routing": True}
    return GenerateRequest(name, tuple(tokens.tolist()), SamplingParams(**(values | params)), version)


@torch.no_grad()
def trainers_view(pair: Pair, asked: GenerateRequest, done: Completion, *, replay: bool) -> tuple[np.ndarray, float]:
    """(log-probs `[R]` of the answer by the trainer, share of its own expert choices that are the engine's)."""
    decoder = pair.trainer._ready.decoder
    device = decoder.build.device
    tokens = torch.tensor([*asked.tokens, *done.tokens.tolist()], device=device)
    assert done.routing is not None
    engines = torch.from_numpy(done.routing.astype(np.int64)).to(device)
    last = torch.arange(engines.shape[-1], device=device).expand(1, *engines.shape[1:])
    bounds = torch.tensor([0, len(tokens)], device=device)
    whole = torch.cat([engines, last]) if replay else None
    hidden, _ = decoder.forward_captured(Packed(tokens, bounds, routing=whole))
    _, own = decoder.forward_captured(Packed(tokens, bounds))
    moe = [layer for layer in range(decoder.config.num_hidden_layers) if decoder.config.is_moe(layer)]
    same = (own[:-1][:, moe].sort(-1).values == engines[:, moe].sort(-1).values).all(-1).float().mean()
    logprobs = torch.log_softmax(decoder.logits(hidden).float(), dim=-1)[len(asked.tokens) - 1 : -1]
    chosen = logprobs.gather(1, tokens[len(asked.tokens) :, None]).squeeze(1)
    return chosen.cpu().numpy(), float(same)


async def check_logprobs(pair: Pair) -> dict[str, float]:
    """The engine's log-probs of its own answers are the trainer's for the same tokens, its expert choices replayed."""
    pair.trainer.onload()
    asked = [request(f"l{n}", length, version=pair.version) for n, length in enumerate((5, 24, 130))]
    done = await asyncio.gather(*(pair.engine.generate(one) for one in asked))
    worst, replayed, own = 0.0, [], []
    for one, completion in zip(asked, done, strict=True):
        assert completion.routing is not None and completion.routing.shape[0] == len(one.tokens) + 15
        assert float(np.exp(completion.top_logprobs.astype(np.float64)).sum(-1).max()) <= 1.0 + 1e-3
        view, same = trainers_view(pair, one, completion, replay=True)
        free, _ = trainers_view(pair, one, completion, replay=False)
        replayed.append(np.abs(view - completion.logprobs))
        own.append(np.abs(free - completion.logprobs))
        worst = max(worst, float(replayed[-1].max()))
    found = {"largest": worst, "mean": float(np.concatenate(replayed).mean()), "routing_equal": same}
    assert worst <= pair.tolerance, f"{found} above {pair.tolerance}"
    return {**found, "mean_without_replay": float(np.concatenate(own).mean())}


async def check_publish_by_handle(pair: Pair) -> dict[str, float]:
    """The trainer's adapter by handle: seen in the log-probs, and then equal to the trainer's."""
    before = np.array(await pair.engine.score((3, 11, 12, 25, 13, 30)))
    began = time.perf_counter()
    await HandlePublisher(_Side(pair.trainer), pair.engine, lambda _: pair.trainer.digest()).publish(Path(), 1)
    seconds = time.perf_counter() - began
    pair.version = 1
    after = np.array(await pair.engine.score((3, 11, 12, 25, 13, 30)))
    pair.trainer.onload()
    ours = np.array(pair.trainer.score((3, 11, 12, 25, 13, 30)))
    effect, canary = float(np.abs(after - before).max()), float(np.abs(after - ours).max())
    assert effect > 0.01, f"the adapter changed log-probs by {effect} only"
    assert canary <= pair.tolerance, f"canary {canary}"
    return {"effect": effect, "canary": canary, "seconds": seconds, **await check_logprobs(pair)}


async def check_publish_by_file(pair: Pair) -> dict[str, float]:
    """Another adapter from its directory; the digest that comes back is the file's."""
    directory = write_adapter(pair.scratch / "adapter-b", pair.model, seed=12)
    digest = await pair.engine.load_adapter(directory, 2)
    assert digest == digest_of_file(directory / "adapter_model.safetensors")
    pair.version = 2
    pair.trainer.onload()
    pair.trainer.restore(str(directory))
    return await check_logprobs(pair)


async def check_refusals(pair: Pair) -> dict[str, str]:
    """Adapters that must not be served, and a request for another version; what is served stays the same."""
    said = {}
    for name, options in (("rank", {"rank": 4}), ("nan", {"spoil": True})):
        bad = write_adapter(pair.scratch / f"adapter-{name}", pair.model, seed=13, **options)  # type: ignore[arg-type]
        try:
            await pair.engine.load_adapter(bad, 9)
        except AdapterRefusedError as error:
            said[name] = str(error)[-80:]
        else:
            raise AssertionError(f"an adapter with a bad {name} was served")
    try:
        await pair.engine.generate(request("stale", 5, version=pair.version + 1))
    except StaleVersionError as error:
        said["version"] = str(error)[-80:]
    else:
        raise AssertionError("a request for another version was answered")
    assert (await pair.engine.health()).policy_version == pair.version
    return said


async def check_sleep_and_wake(pair: Pair) -> dict[str, float]:
    """The card is free for the trainer meanwhile, and the same log-probs come back."""
    before = np.array(await pair.engine.score((5, 6, 7, 8)))
    taken = _free_bytes()
    await pair.engine.sleep()
    try:
        await pair.engine.generate(request("asleep", 5, version=pair.version))
    except EngineError as error:
        assert "asleep" in str(error)
    asleep = _free_bytes()
    pair.trainer.onload()
    pair.trainer.score((5, 6, 7, 8))
    pair.trainer.offload()
    await pair.engine.wake()
    after = np.array(await pair.engine.score((5, 6, 7, 8)))
    difference = float(np.abs(after - before).max())
    assert difference <= 1e-3, f"log-probs differ by {difference} after sleep and wake"
    return {"difference": difference, "gib_given_back": (asleep - taken) / 2**30}


async def check_abort(pair: Pair) -> dict[str, int]:
    """An aborted request returns what there is; the next one runs."""
    asked = request("abort", 8, version=pair.version, count=1500)
    task = asyncio.create_task(pair.engine.generate(asked))
    while not (await pair.engine.health()).running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await pair.engine.abort(("abort",))
    done = await asyncio.wait_for(task, 60)
    assert done.finish is FinishReason.ABORT and len(done.tokens) < 1500
    short = replace(asked, request_id="again", params=replace(asked.params, max_new_tokens=3))
    again = await pair.engine.generate(short)
    assert len(again.tokens) == 3
    return {"tokens_before_the_abort": len(done.tokens)}


CHECKS: tuple[tuple[str, Callable[[Pair], Awaitable[dict[str, Any]]]], ...] = (
    ("logprobs-base", check_logprobs),
    ("publish-by-handle", check_publish_by_handle),
    ("publish-by-file", check_publish_by_file),
    ("refusals", check_refusals),
    ("sleep-and-wake", check_sleep_and_wake),
    ("abort", check_abort),
)
"""In order: a later one uses the adapter of an earlier one. The first one needs an engine with the base alone and a
trainer whose adapter is zero."""


async def run_checks(pair: Pair, say: Callable[[str], None]) -> dict[str, Any]:
    """Every check, one after the other, whatever happens to the ones before."""
    found: dict[str, Any] = {}
    for name, check in CHECKS:
        began = time.perf_counter()
        try:
            if name == "logprobs-base":
                pair.trainer.restore(None)
            elif name == "publish-by-handle":
                pair.trainer.restore(str(pair.scratch / "adapter-a"))
            found[name] = {"ok": True, **await check(pair)}
        except Exception as error:  # the next check is still worth the lent minutes
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
        found[name]["took_s"] = round(time.perf_counter() - began, 2)
        say(f"{name}: {json.dumps(found[name])}")
    return found


class _Side:
    """One trainer rank in this process, as the publisher sees it."""

    def __init__(self, trainer: TrainWorker) -> None:
        self._trainer = trainer

    async def export(self, version: int) -> Handles:
        reply = await asyncio.to_thread(self._trainer.sync, "handles", version)
        return Handles([reply["payload"]], reply["checksums"])

    async def release(self, version: int) -> Released:
        reply = self._trainer.sync("release", version)
        return Released(reply["freed"], reply["held"])


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
