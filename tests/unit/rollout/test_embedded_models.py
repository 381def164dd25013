"""The embedded engine's core on other models of the family: without an indexer, packed experts, BF16, long prompts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.mla import MlaAttention
from k31core.model.weight_names import base_slots
from k31core.ops.experts import expert_mlp
from k31core.rl.selection import check_selection, to_positions
from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engines.embedded.core import EngineCore, Limits
from k31core.rollout.engines.embedded.experts import BatchedExperts
from k31core.rollout.engines.embedded.forward import CachedDecoder
from tests.model_cases import config_of, write_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{name: (config.json, directory)}."""
    made = {}
    for name, options in {
        "k31": {"layers": 5, "mla": (3, 5), "kda_heads": 3, "index_topk": 9},
        "k3": {"layers": 4, "mla": (2,), "k31": False, "num_attention_heads": 3},
        "dense": {"layers": 3, "mla": (2,), "first_k_dense_replace": 3},
    }.items():
        raw = config_of(**options)
        made[name] = (raw, write_checkpoint(tmp_path_factory.mktemp(name), raw))
    return made


def decoder_of(checkpoint, dtype=torch.float32):
    raw, directory = checkpoint
    decoder = Decoder(parse_config(raw), Build(dtype=dtype))
    NativeCheckpoint(directory).load(base_slots(decoder))
    return decoder


def run(core, requests):
    core.submit(requests)
    done = {}
    while core.busy:
        done.update({completion.request_id: completion for completion in core.advance()})
    return done


def requests(lengths, new=6, **changes):
    rng = np.random.default_rng(1)
    params = SamplingParams(1.0, 1.0, 0, new, (), seed=0, top_logprobs_num=4, return_routing=True)
    params = replace(params, **changes)
    return [
        GenerateRequest(f"r{i}", tuple(rng.integers(0, 96, n).tolist()), replace(params, seed=i), -1)
        for i, n in enumerate(lengths)
    ]


def same(a, b):
    return all(
        np.array_equal(getattr(a, f), getattr(b, f))
        for f in ("tokens", "logprobs", "top_ids", "top_logprobs", "routing")
    )


@torch.no_grad()
def trainer_logprobs(decoder, asked, completion):
    tokens = torch.tensor([*asked.tokens, *completion.tokens.tolist()])
    hidden, routing = decoder.forward_captured(Packed(tokens, torch.tensor([0, len(tokens)])))
    logprobs = torch.log_softmax(decoder.logits(hidden), dim=-1)[len(asked.tokens) - 1 : -1]
    return logprobs.gather(1, tokens[len(asked.tokens) :, None]).squeeze(1).numpy(), routing[:-1].numpy()


@pytest.mark.parametrize("name", ["k31", "k3", "dense"])
@pytest.mark.parametrize("packed", [False, True], ids=["decoded-experts", "packed-experts"])
def test_agrees_with_the_trainer_and_with_itself_alone(checkpoints, name, packed):
    decoder = decoder_of(checkpoints[name])
    options = {"dense_experts_bytes": 0} if packed else {}
    asked = requests([2, 33, 64, 70, 5])
    limits = Limits(8, 2048, 2048)
    together = run(EngineCore(CachedDecoder(decoder, **options), limits), asked)
    for request in asked:
        completion = together[request.request_id]
        alone = run(EngineCore(CachedDecoder(decoder, **options), limits), [request])[request.request_id]
        assert same(alone, completion)
        logprobs, routing = trainer_logprobs(decoder, request, completion)
        assert np.abs(logprobs - completion.logprobs).max() < 1e-4
        assert np.array_equal(routing, completion.routing)


def test_long_prompt_has_the_same_bits_however_it_is_cut(checkpoints):
    """700 tokens: several query chunks, many cache blocks; prefill in pieces of 64, 128 and at once, with company."""
    decoder = decoder_of(checkpoints["k31"])
    long, *company = requests([700, 20, 90], new=3)
    whole = run(EngineCore(CachedDecoder(decoder), Limits(4, 2048, 4096)), [long])["r0"]
    for chunk in (64, 130):
        cut = run(EngineCore(CachedDecoder(decoder), Limits(4, 2048, chunk)), [company[0], long, company[1]])["r0"]
        assert same(cut, whole)
    logprobs, _ = trainer_logprobs(decoder, long, whole)
    assert np.abs(logprobs - whole.logprobs).max() < 1e-4


class _Recording(MlaAttention):
    """Keeps what it selected."""

    def select(self, *arguments):
        self.chosen = super().select(*arguments)
        return self.chosen


@torch.no_grad()
def trainer_selection(decoder, asked, completion):
    """int32 `[P + R - 1, M, topk]`: what the trainer's packed forward of the same tokens selects."""
    attentions = [decoder.layers[index].self_attn for index in decoder.config.mla_layers]
    for attention in attentions:
        attention.__class__ = _Recording
    tokens = torch.tensor([*asked.tokens, *completion.tokens.tolist()])
    decoder(Packed(tokens, torch.tensor([0, len(tokens)])))
    return torch.stack([attention.chosen for attention in attentions], dim=1)[:-1].numpy()


@pytest.mark.parametrize("chunk", [2048, 64])
def test_selected_keys_are_the_trainers_and_a_request_decides_whether_they_are_kept(checkpoints, chunk):
    """Prompts over several pieces and cache blocks, one shared by requests that ask and that do not."""
    decoder = decoder_of(checkpoints["k31"])
    asked = requests([2, 9, 10, 33, 150, 270], new=12, return_selection=True)
    silent = replace(asked[3], request_id="silent", params=replace(asked[3].params, return_selection=False))
    done = run(EngineCore(CachedDecoder(decoder), Limits(8, 2048, chunk)), [*asked, silent])
    assert done["silent"].selection is None and same(done["silent"], done["r3"])
    for request in asked:
        completion = done[request.request_id]
        inputs = len(request.tokens) + len(completion.tokens) - 1
        check_selection(completion.selection, inputs=inputs, layers=2, topk=9)
        expected = trainer_selection(decoder, request, completion)
        assert np.array_equal(to_positions(completion.selection, inputs), expected)


def test_a_model_without_an_indexer_refuses_to_record_its_selection(checkpoints):
    core = EngineCore(CachedDecoder(decoder_of(checkpoints["k3"])), Limits(8, 2048, 2048))
    with pytest.raises(ValueError, match=r"request r0: asks for the DSA selection .* kimi_k3 has no indexer"):
        core.check_fits(requests([5], return_selection=True)[0])


def test_samples_of_a_group_share_their_prompt(checkpoints):
    """Each distinct prompt is computed once, and a late sample of the group finds it kept."""
    decoder = CachedDecoder(decoder_of(checkpoints["k31"]))
    computed = []
    prefill = decoder.prefill
    decoder.prefill = lambda pieces: (computed.extend(len(p.tokens) for p in pieces), prefill(pieces))[1]
    base = requests([30, 40])
    asked = [
        replace(r, request_id=f"{r.request_id}-{i}", params=replace(r.params, seed=i)) for r in base for i in range(6)
    ]
    done = run(EngineCore(decoder, Limits(4, 2048, 2048)), asked)
    assert sorted(computed) == [30, 40]
    assert len({done[f"r0-{i}"].tokens.tobytes() for i in range(6)}) > 1
    again = run(EngineCore(decoder, Limits(4, 2048, 2048)), [asked[5]])
    assert same(again["r0-5"], done["r0-5"])


def test_bfloat16_is_independent_of_the_batch_and_close_to_the_trainer(checkpoints):
    decoder = decoder_of(checkpoints["k31"], torch.bfloat16)
    asked = requests([8, 40, 65])
    together = run(EngineCore(CachedDecoder(decoder), Limits(8, 2048, 2048)), asked)
    differences = []
    for request in asked:
        completion = together[request.request_id]
        alone = run(EngineCore(CachedDecoder(decoder), Limits(8, 2048, 2048)), [request])[request.request_id]
        assert same(alone, completion)
        logprobs, _ = trainer_logprobs(decoder, request, completion)
        differences.extend(np.abs(logprobs - completion.logprobs).tolist())
    assert np.mean(differences) < 0.1


def test_batched_experts_equal_the_operator(checkpoints):
    decoder = decoder_of(checkpoints["k31"])
    moe = next(layer.block_sparse_moe for layer in decoder.layers.values() if layer.block_sparse_moe)
    x = torch.randn(21, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        routed, chosen = BatchedExperts(moe)(x)
        indices, weights = moe.route(x)
        assert torch.equal(chosen, indices)
        latent = moe.routed_expert_down_proj(x)
        mixed = torch.zeros_like(latent)
        for token in range(21):
            for slot in range(indices.shape[1]):
                counts = torch.zeros(moe.num_experts, dtype=torch.int64)
                counts[indices[token, slot]] = 1
                y = expert_mlp(latent[token : token + 1], counts, moe.experts.weights())
                mixed[token] += y[0] * weights[token, slot]
        expected = moe.routed_expert_up_proj(moe.routed_expert_norm(mixed))
    assert torch.allclose(routed, expected, atol=2e-5)
