"""By hand: tokens a second of the embedded engine, of recomputing the prefix each step, and of Hugging Face `generate`.

    python tests/bench/bench_engine.py [--size tiny|small] [--prompt 64] [--new 256] [--batch 32] [--only
    engine,recompute,hf,rollout]

`engine`: the cached decoder, everything recorded (log-probs, 16 candidates, routing). `recompute`: the trainer's
packed forward over all prefixes for each token; every 16th length is timed and stands for 16. `hf`: transformers'
Kimi-Linear at the same number of parameters and without fla, greedy. `rollout`: the tiny recipe's shape, 16 prompts x
8 samples of 20 tokens with a rank-16 adapter. One thread, fp32, random weights. Seconds are CPU seconds of the
process (a busy machine stretches the wall clock, which is printed too). The model of the first three has no adapter,
as Hugging Face's has none.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from k31core.model.build import Build, LoraSpec
from k31core.model.config import DsaConfig, ModelConfig
from k31core.model.decoder import Decoder, Packed
from k31core.model.sizes import KIMI_K31
from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engines.embedded.core import EngineCore, Limits
from k31core.rollout.engines.embedded.forward import CachedDecoder

REPEATS = 3
STRIDE = 16
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "attn_res_block_size": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kda_num_heads": 2,
    "kda_head_dim": 32,
    "mla_layers": (3, 7),
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "dsa": DsaConfig(4, 16, 16),
}
_SMALL = _TINY | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kda_num_heads": 4,
    "kda_head_dim": 64,
    "moe_intermediate_size": 128,
    "routed_expert_hidden_size": 128,
}
SIZES: dict[str, ModelConfig] = {"tiny": replace(KIMI_K31, **_TINY), "small": replace(KIMI_K31, **_SMALL)}


def random_decoder(config: ModelConfig, lora: LoraSpec | None = None) -> Decoder:
    """Random weights of a sensible size; packed experts of random codes."""
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder(config, Build(lora=lora)).requires_grad_(False)
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    for name, buffer in decoder.named_buffers():
        if name.endswith("_packed"):
            buffer.random_(0, 256, generator=generator)
        elif name.endswith("_scale"):
            buffer.fill_(124)
    return decoder


def parameter_count(decoder: Decoder) -> int:
    """Logical weights: a packed code counts as one."""
    packed = sum(b.numel() * 2 for name, b in decoder.named_buffers() if name.endswith("_packed"))
    return packed + sum(p.numel() for name, p in decoder.named_parameters() if "lora" not in name)


def make_requests(config: ModelConfig, prompts: int, samples: int, prompt: int, new: int) -> list[GenerateRequest]:
    """`samples` answers to each of `prompts` random prompts; no stop token."""
    rng = np.random.default_rng(0)
    params = SamplingParams(1.0, 1.0, 0, new, (), 0, top_logprobs_num=16, return_routing=True)
    tokens = [tuple(rng.integers(0, config.vocab_size, prompt).tolist()) for _ in range(prompts)]
    return [
        GenerateRequest(f"{i}-{j}", tokens[i], replace(params, seed=i * samples + j), -1)
        for i in range(prompts)
        for j in range(samples)
    ]


class Clock(NamedTuple):
    """CPU and wall seconds."""

    cpu: float
    wall: float

    @staticmethod
    def now() -> "Clock":
        """Both clocks."""
        return Clock(time.process_time(), time.perf_counter())

    def since(self, begun: "Clock") -> "Clock":
        """What has passed."""
        return Clock(self.cpu - begun.cpu, self.wall - begun.wall)


def engine_seconds(decoder: Decoder, requests: list[GenerateRequest]) -> Callable[[], Clock]:
    """A timed run of all requests at once."""
    longest = max(len(r.tokens) + r.params.max_new_tokens for r in requests)
    core = EngineCore(CachedDecoder(decoder), Limits(len(requests), len(requests) * (longest + 64), 2048))

    def run() -> Clock:
        begun = Clock.now()
        core.submit(requests)
        while core.busy:
            core.advance()
        return Clock.now().since(begun)

    return run


@torch.inference_mode()
def recompute_seconds(decoder: Decoder, batch: int, prompt: int, new: int) -> Clock:
    """Time of `new` packed forwards over growing prefixes; every STRIDE-th is run."""
    cpu = wall = 0.0
    for length in range(prompt, prompt + new, STRIDE):
        tokens = torch.randint(0, decoder.config.vocab_size, (batch * length,))
        bounds = torch.arange(batch + 1) * length
        begun = Clock.now()
        hidden = decoder(Packed(tokens, bounds))
        decoder.logits(hidden[bounds[1:] - 1]).argmax(-1)
        passed = Clock.now().since(begun)
        cpu, wall = cpu + passed.cpu * STRIDE, wall + passed.wall * STRIDE
    return Clock(cpu, wall)


def hf_model(config: ModelConfig, parameters: int):  # type: ignore[no-untyped-def]
    """Kimi-Linear of the same shape, its experts' width chosen to meet the number of parameters."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    def build(width: int):  # type: ignore[no-untyped-def]
        kinds = ["full_attention" if config.is_mla(i) else "linear_attention" for i in range(config.num_hidden_layers)]
        return KimiLinearForCausalLM(
            KimiLinearConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                moe_intermediate_size=width,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                kv_lora_rank=config.kv_lora_rank,
                q_lora_rank=config.q_lora_rank,
                qk_rope_head_dim=config.qk_rope_head_dim,
                qk_nope_head_dim=config.qk_nope_head_dim,
                v_head_dim=config.v_head_dim,
                num_experts_per_tok=config.num_experts_per_token,
                num_local_experts=config.num_experts,
                n_shared_experts=config.num_shared_experts,
                linear_head_dim=config.kda_head_dim,
                linear_num_heads=config.kda_num_heads,
                layer_types=kinds,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=None,
            )
        ).eval()

    counts = {width: sum(p.numel() for p in build(width).parameters()) for width in (32, 64)}
    slope = (counts[64] - counts[32]) / 32
    # its grouped products want rows of a multiple of 16 bytes
    return build(max(4, round((32 + (parameters - counts[32]) / slope) / 4) * 4))


@torch.inference_mode()
def hf_seconds(model, batch: int, prompt: int, new: int) -> Clock:  # type: ignore[no-untyped-def]
    """One call of `generate` with its own cache."""
    tokens = torch.randint(2, model.config.vocab_size, (batch, prompt))
    begun = Clock.now()
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False
    )
    assert out.shape == (batch, prompt + new), out.shape
    return Clock.now().since(begun)


def median(run: Callable[[], Clock]) -> Clock:
    """The run with the median CPU time of REPEATS timed runs after one that is not counted."""
    run()
    return sorted(run() for _ in range(REPEATS))[REPEATS // 2]


def main() -> None:
    """Parse arguments, print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", default="engine,recompute,hf,rollout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config, only = SIZES[args.size], args.only.split(",")
    tokens = args.batch * args.new
    decoder = random_decoder(config)
    parameters = parameter_count(decoder)
    if "engine" in only:
        requests = make_requests(config, args.batch, 1, args.prompt, args.new)
        _report("engine", parameters, tokens, median(engine_seconds(decoder, requests)))
    if "recompute" in only:
        _report("recompute", parameters, tokens, recompute_seconds(decoder, args.batch, args.prompt, args.new))
    if "hf" in only:
        model = hf_model(config, parameters)
        count = sum(p.numel() for p in model.parameters())
        hf_seconds(model, args.batch, args.prompt, 4)
        _report("hf generate, one run", count, tokens, hf_seconds(model, args.batch, args.prompt, args.new))
    if "rollout" in only:
        adapted = random_decoder(config, LoraSpec(16, 32.0))
        requests = make_requests(config, 16, 8, 6, 20)
        _report("rollout 16 x 8, 20 new, rank 16", parameters, 128 * 20, median(engine_seconds(adapted, requests)))


def _report(what: str, parameters: int, tokens: int, passed: Clock) -> None:
    line = {
        "what": what,
        "parameters": parameters,
        "cpu_s": round(passed.cpu, 2),
        "wall_s": round(passed.wall, 2),
        "tokens_per_cpu_s": round(tokens / passed.cpu),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
