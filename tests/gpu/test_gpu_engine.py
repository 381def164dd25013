"""The embedded engine on a GPU: agrees with the trainer's forward there, loads adapters, keeps its caches apart."""

import asyncio

import numpy as np
import pytest
import torch

from k31core.checkpoint.adapter import load_adapter
from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.checkpoint.native import NativeCheckpoint
from k31core.convert.random_checkpoint import make_random_checkpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.weight_names import adapter_slots, base_slots
from k31core.recipe.model import RandomCheckpoint
from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engines.embedded.cache import Caches
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from k31core.rollout.engines.embedded.forward import CachedDecoder, StepInput
from k31core.rollout.engines.embedded.graphs import DecodeGraphs, why_not
from tests.contract.engine_cases import ADAPTER, ALPHA, LIMITS, MODEL, RANK, generate_all, mixed_requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 0.3)])
def test_logprobs_are_the_trainers(dtype, tolerance):
    """Mean difference of sampled log-probs over mixed requests; fp32 products may run in TF32 inside kernels."""
    lora = LoraSpec(RANK, ALPHA)

    async def main():
        engine = await EmbeddedEngine.open(MODEL, EmbeddedOptions(LIMITS, lora, dtype=dtype, device="cuda"))
        try:
            digest = await engine.load_adapter(ADAPTER, 0)
            requests = mixed_requests(version=0)
            return digest, requests, await generate_all(engine, requests), await generate_all(engine, requests[::-1])
        finally:
            await engine.close()

    digest, requests, done, again = asyncio.run(main())
    if dtype is torch.float32:
        assert digest == digest_of_file(ADAPTER / "adapter_model.safetensors")
    decoder = Decoder(load_config(MODEL), Build(lora=lora, dtype=dtype, device=torch.device("cuda")))
    NativeCheckpoint(MODEL).load(base_slots(decoder))
    load_adapter(ADAPTER, adapter_slots(decoder))
    differences, routes, equal = [], [], 0
    for asked in requests:
        completion = done[asked.request_id]
        tokens = torch.tensor([*asked.tokens, *completion.tokens.tolist()], device="cuda")
        routing = torch.from_numpy(completion.routing).cuda()
        replay = torch.cat([routing, torch.arange(3, device="cuda").expand(1, 7, 3).to(routing.dtype)])
        with torch.no_grad():
            bounds = torch.tensor([0, len(tokens)], device="cuda")
            hidden, _ = decoder.forward_captured(Packed(tokens, bounds, routing=replay))
            _, own = decoder.forward_captured(Packed(tokens, bounds))
            logprobs = torch.log_softmax(decoder.logits(hidden), dim=-1)[len(asked.tokens) - 1 : -1]
        chosen = logprobs.gather(1, tokens[len(asked.tokens) :, None]).squeeze(1).cpu().numpy()
        differences.extend(np.abs(chosen - completion.logprobs).tolist())
        routes.append(float((own[:-1] == routing).float().mean()))
        equal += np.array_equal(completion.tokens, again[asked.request_id].tokens)
    print(
        f"{dtype}: mean {np.mean(differences):.2e}, largest {max(differences):.2e}, "
        f"routing equal {np.mean(routes):.4f}, {equal} of {len(requests)} answers equal in another order"
    )
    assert np.mean(differences) < tolerance


GRAPH_SIZES = RandomCheckpoint(
    num_hidden_layers=5, num_experts=8, num_experts_per_token=2, hidden_size=512, intermediate_size=512, vocab_size=96,
    num_heads=4, kda_head_dim=64, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=32, index_n_heads=4, index_head_dim=32, index_topk=64, routed_expert_hidden_size=512,
    moe_intermediate_size=512,
)  # fmt: skip
"""Small, but with experts that the fused kernel takes: a step is captured only on that path."""


def cached(model_dir):
    decoder = Decoder(load_config(model_dir), Build(dtype=torch.bfloat16, device=torch.device("cuda")))
    decoder.requires_grad_(False)
    NativeCheckpoint(model_dir).load(base_slots(decoder), progress=False)
    return CachedDecoder(decoder, dense_experts_bytes=0)


@torch.inference_mode()
def test_graphs_replay_the_eager_step(tmp_path):
    """The same steps by graphs and eagerly, from the same caches: logits, routing and every state, step after step."""
    make_random_checkpoint(GRAPH_SIZES, "kimi_k31", tmp_path / "model", torch.device("cuda"))
    decoder = cached(tmp_path / "model")
    assert why_not(decoder) is None
    generator = torch.Generator("cuda").manual_seed(0)
    pair = [Caches(decoder.config, 16, 40, torch.bfloat16, torch.device("cuda")) for _ in range(2)]
    for name in ("conv", "state", "latent", "index_keys"):
        values = torch.randn(getattr(pair[0], name).shape, generator=generator, device="cuda") * 0.3
        for caches in pair:
            getattr(caches, name).copy_(values)
    graphs = DecodeGraphs(decoder, pair[1])
    position = torch.randint(60, 120, (16,), generator=generator, device="cuda")
    pages = 1 + torch.arange(32, device="cuda").view(16, 2)
    for number in range(12):  # 16 rows and 8 take turns; positions cross into the second block
        rows = 16 if number % 2 else 8
        tokens = torch.randint(0, 96, (rows,), generator=generator, device="cuda")
        step = StepInput(tokens, position[:rows].clone(), pages[:rows])
        eager, replayed = decoder.decode(step, pair[0]), graphs.decode(step)
        difference = float((eager[0] - replayed[0]).abs().max())
        same = float((eager[1] == replayed[1]).float().mean())
        print(f"step {number}, {rows} rows: logits off by {difference:.2e}, routing equal {same:.4f}")
        assert difference < 0.1 and same > 0.95
        position[:rows] += 1
        for name in ("conv", "state", "latent", "index_keys"):  # what follows starts from the same caches again
            own, other = getattr(pair[0], name), getattr(pair[1], name)
            assert torch.allclose(own[:, 1:].float(), other[:, 1:].float(), atol=0.05, rtol=0.05), name
            other.copy_(own)
    assert graphs.count == 2


def test_an_engine_with_graphs_answers_like_one_without(tmp_path):
    """Whole answers, greedy: the first log-probs agree; how many tokens do is printed."""
    make_random_checkpoint(GRAPH_SIZES, "kimi_k31", tmp_path / "model", torch.device("cuda"))
    rng = np.random.default_rng(0)
    params = SamplingParams(0.0, 1.0, 0, 40, (), seed=0, top_logprobs_num=4, return_routing=True)
    requests = [
        GenerateRequest(f"r{i}", tuple(rng.integers(0, 96, 20 + 7 * i).tolist()), params, -1) for i in range(12)
    ]

    async def answers(cuda_graphs):
        options = EmbeddedOptions(LIMITS, dtype=torch.bfloat16, device="cuda", cuda_graphs=cuda_graphs)
        engine = await EmbeddedEngine.open(tmp_path / "model", options)
        try:
            done = await asyncio.gather(*(engine.generate(request) for request in requests))
            graphs = engine._core._graphs
            return done, 0 if graphs is None else graphs.count
        finally:
            await engine.close()

    eager, none = asyncio.run(answers(False))
    replayed, captured = asyncio.run(answers(True))
    assert none == 0 and captured >= 1
    first = [abs(a.logprobs[:2] - b.logprobs[:2]).max() for a, b in zip(eager, replayed, strict=True)]
    equal = [float((a.tokens == b.tokens).mean()) for a, b in zip(eager, replayed, strict=True)]
    print(f"{captured} graphs; first log-probs off by {max(first):.2e}; tokens equal {np.mean(equal):.3f}")
    assert max(first) < 0.1
