"""Engine contract: what a completion holds, and that it depends on its request and the adapter only."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.rl.selection import check_selection
from k31core.rl.types import FinishReason
from k31core.rollout.engines.embedded.core import Limits
from tests.contract.engine_cases import (
    ADAPTER,
    STOP,
    assert_same,
    embedded,
    generate_all,
    mixed_requests,
    prompt,
    request,
    trainer_model,
    trainer_view,
)
from tests.sglang_standin.engines import over_http

ENGINES = [pytest.param(embedded, id="embedded"), pytest.param(over_http, id="http")]
TOLERANCE = 1e-4
"""fp32 log-probs, engine against the trainer's packed forward."""


@pytest.mark.parametrize("open_engine", ENGINES)
def test_results_do_not_depend_on_the_batch(open_engine):
    """Alone, all together, in any order, in a small engine, with prompts cut into pieces: the same bits."""
    requests = mixed_requests(version=0)
    shuffled = random.Random(5).sample(requests, len(requests))

    async def main():
        async with open_engine() as engine:
            await engine.load_adapter(ADAPTER, 0)
            alone = {r.request_id: await engine.generate(r) for r in requests}
            together = await generate_all(engine, requests)
        async with open_engine(Limits(5, 1024, 64)) as engine:
            await engine.load_adapter(ADAPTER, 0)
            small = await generate_all(engine, shuffled)
        return alone, together, small

    alone, together, small = asyncio.run(main())
    for name, completion in alone.items():
        assert_same(completion, together[name])
        assert_same(completion, small[name])


@pytest.mark.parametrize("open_engine", ENGINES)
@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["base", "adapter"])
def test_logprobs_and_routing_are_the_trainers(open_engine, adapter):
    """Sampled log-probs, candidates and experts agree with the trainer's packed forward of the same tokens."""

    async def main():
        async with open_engine() as engine:
            if adapter is not None:
                await engine.load_adapter(adapter, 0)
            requests = mixed_requests(version=-1 if adapter is None else 0)
            return requests, await generate_all(engine, requests)

    requests, done = asyncio.run(main())
    decoder = trainer_model(adapter)
    for asked in requests:
        completion = done[asked.request_id]
        logprobs, routing = trainer_view(decoder, asked, completion)
        rows = np.arange(len(completion.tokens))
        assert np.abs(logprobs[rows, completion.tokens] - completion.logprobs).max() < TOLERANCE
        expected = np.take_along_axis(logprobs, completion.top_ids, axis=1)
        assert np.abs(expected - completion.top_logprobs).max() < TOLERANCE
        assert np.array_equal(completion.routing, routing)


@pytest.mark.parametrize("open_engine", ENGINES)
def test_selected_keys_come_with_the_answer_when_asked(open_engine):
    """The DSA selection of every input token, in the trainer's form; everything else as without it."""

    async def main():
        async with open_engine() as engine:
            asked = [request(f"k{n}", prompt(n, n), return_selection=True, stop_token_ids=()) for n in (2, 30, 70)]
            plain = [replace(r, params=replace(r.params, return_selection=False)) for r in asked]
            return asked, await generate_all(engine, plain), await generate_all(engine, asked)

    asked, plain, done = asyncio.run(main())
    for sent in asked:
        completion = done[sent.request_id]
        assert plain[sent.request_id].selection is None
        assert_same(plain[sent.request_id], completion)
        inputs = len(sent.tokens) + len(completion.tokens) - 1
        check_selection(completion.selection, inputs=inputs, layers=2, topk=5)


@pytest.mark.parametrize("open_engine", ENGINES)
def test_shapes_stop_and_length(open_engine):
    """Lengths of every column; a stop token ends and is kept; the limit truncates."""

    async def main():
        async with open_engine() as engine:
            tokens = prompt(1, 9)
            long = await engine.generate(request("long", tokens, max_new_tokens=24, stop_token_ids=()))
            stop = int(long.tokens[20])
            return long, await engine.generate(request("long", tokens, max_new_tokens=24, stop_token_ids=(stop,))), stop

    long, stopped, stop = asyncio.run(main())
    assert long.finish is FinishReason.LENGTH and long.truncated and len(long.tokens) == 24
    assert stopped.finish is FinishReason.STOP and stopped.tokens[-1] == stop
    cut = long.tokens.tolist().index(stop) + 1
    assert np.array_equal(stopped.tokens, long.tokens[:cut])
    for completion in (long, stopped):
        count = len(completion.tokens)
        assert completion.tokens.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert completion.top_ids.shape == completion.top_logprobs.shape == (count, 8)
        assert completion.routing.shape == (9 + count - 1, 7, 3) and completion.routing.dtype == np.int16
        assert (completion.routing[:, 0] == 0).all()


@pytest.mark.parametrize("open_engine", ENGINES)
def test_candidates_are_the_best_words_and_sum_to_the_head_mass(open_engine):
    """`selected`: K of the whole vocabulary, best first; with K = V the masses sum to one."""

    async def main():
        async with open_engine() as engine:
            everything = await engine.generate(request("a", prompt(3, 20), top_logprobs_num=96))
            few = await engine.generate(request("a", prompt(3, 20), top_logprobs_num=5))
            return everything, few

    everything, few = asyncio.run(main())
    assert everything.top_ids.shape[1] == 96
    assert np.allclose(np.exp(everything.top_logprobs).sum(1), 1.0, atol=1e-5)
    assert np.array_equal(np.sort(everything.top_ids, axis=1), np.tile(np.arange(96), (len(everything.tokens), 1)))
    assert (np.diff(everything.top_logprobs, axis=1) <= 0).all()
    assert np.array_equal(few.top_ids, everything.top_ids[:, :5])
    assert np.array_equal(few.top_logprobs, everything.top_logprobs[:, :5])


@pytest.mark.parametrize("open_engine", ENGINES[:1])  # SGLang records log-probs before the filter: refused there
@pytest.mark.parametrize("sampling", [{"top_k": 6}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.7, "temperature": 0.7}])
def test_filtered_sampling_records_its_whole_support(open_engine, sampling):
    """`support`: every word that could be drawn, renormalised; padding is -1 and -inf; no other word is ever drawn."""
    asked = request("f", prompt(4, 11), max_new_tokens=12, stop_token_ids=(), top_logprobs_num=4, **sampling)

    async def main():
        async with open_engine() as engine:
            return await engine.generate(asked)

    completion = asyncio.run(main())
    used = completion.top_ids >= 0
    assert (used == np.isfinite(completion.top_logprobs)).all()
    assert np.allclose(np.exp(completion.top_logprobs).sum(1), 1.0, atol=1e-5)
    logprobs, _ = trainer_view(trainer_model(None), asked, completion)
    for row, token in enumerate(completion.tokens):
        order = np.argsort(-logprobs[row], kind="stable")[: sampling.get("top_k", 96)]
        mass = np.exp(logprobs[row][order])
        before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
        support = order[before < sampling.get("top_p", 1.0)]
        ids = completion.top_ids[row][used[row]]
        assert set(ids.tolist()) == set(support.tolist())
        assert token in ids
        at = int(np.flatnonzero(ids == token)[0])
        assert completion.logprobs[row] == completion.top_logprobs[row][at]


@pytest.mark.parametrize("open_engine", ENGINES)
def test_seed_decides_the_draw_and_greedy_takes_the_best(open_engine):
    """Other seeds give other answers, equal seeds equal ones; temperature 0 ignores the seed."""

    async def main():
        async with open_engine() as engine:
            tokens = prompt(6, 8)
            seeds = [await engine.generate(request("s", tokens, seed=seed, stop_token_ids=())) for seed in (1, 2, 1)]
            greedy = [await engine.generate(request("s", tokens, seed=seed, temperature=0.0)) for seed in (1, 2)]
            return seeds, greedy

    (one, two, again), (greedy, other) = asyncio.run(main())
    assert_same(one, again)
    assert not np.array_equal(one.tokens, two.tokens)
    assert_same(greedy, other)
    assert np.array_equal(greedy.tokens, greedy.top_ids[:, 0])


@pytest.mark.parametrize("open_engine", ENGINES)
def test_draws_follow_the_distribution(open_engine):
    """First tokens of 2,000 seeds: each word's share lies within five standard deviations of its probability."""
    count = 2000
    requests = [
        request(f"d{seed}", prompt(7, 5), seed=seed, max_new_tokens=1, stop_token_ids=(), top_logprobs_num=96)
        for seed in range(count)
    ]

    async def main():
        async with open_engine(Limits(256, 65536, 2048)) as engine:
            return await generate_all(engine, requests)

    done = list(asyncio.run(main()).values())
    first = done[0]
    probability = np.zeros(96)
    probability[first.top_ids[0]] = np.exp(first.top_logprobs[0])
    share = np.bincount([int(c.tokens[0]) for c in done], minlength=96) / count
    deviation = np.sqrt(probability * (1 - probability) / count)
    assert (np.abs(share - probability) <= 5 * deviation + 1 / count).all()


@pytest.mark.parametrize("open_engine", ENGINES)
def test_score_is_the_trainers_logprobs(open_engine):
    """The canary: fixed tokens, adapter on and off, over several cache blocks."""
    tokens = prompt(8, 150)

    async def main():
        async with open_engine() as engine:
            base = await engine.score(tokens)
            await engine.load_adapter(ADAPTER, 0)
            return base, await engine.score(tokens)

    base, adapted = asyncio.run(main())
    assert len(base) == len(adapted) == 149
    asked = request("c", tokens[:1], stop_token_ids=(STOP,))
    for scores, adapter in ((base, None), (adapted, ADAPTER)):
        whole = type("Tokens", (), {"tokens": np.array(tokens[1:])})()
        logprobs, _ = trainer_view(trainer_model(adapter), asked, whole)
        expected = logprobs[np.arange(149), tokens[1:]]
        assert np.abs(expected - np.array(scores)).max() < TOLERANCE
    assert np.abs(np.array(base) - np.array(adapted)).max() > 1e-3
    assert len(digest_of_file(ADAPTER / "adapter_model.safetensors")) == 64
