"""Engine contract: adapter versions, refusals, abort, sleep and wake, restart, limits."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.rl.types import FinishReason
from k31core.rollout.engine import AdapterRefusedError, EngineError, StaleVersionError
from k31core.rollout.engines.embedded.core import Limits
from tests.contract.engine_cases import ADAPTER, assert_same, changed_adapter, embedded, generate_all, prompt, request
from tests.sglang_standin.engines import over_http

ENGINES = [pytest.param(embedded, id="embedded"), pytest.param(over_http, id="http")]
FACTOR = "language_model.model.layers.0.self_attn.o_proj.lora_B.weight"


@pytest.mark.parametrize("open_engine", ENGINES)
def test_version_is_on_every_completion_and_others_are_refused(open_engine):
    """-1 is the base; a request for another version than the loaded one is refused; the digest is the file's."""

    async def main():
        async with open_engine() as engine:
            asked = request("v", prompt(1, 6), stop_token_ids=())
            base = await engine.generate(asked)
            assert base.policy_version == -1 and (await engine.health()).policy_version == -1
            with pytest.raises(StaleVersionError, match="wants adapter version 0, version -1 is loaded"):
                await engine.generate(replace(asked, policy_version=0))
            digest = await engine.load_adapter(ADAPTER, 0)
            assert digest == digest_of_file(ADAPTER / "adapter_model.safetensors")
            adapted = await engine.generate(replace(asked, policy_version=0))
            assert adapted.policy_version == 0 and not np.array_equal(adapted.logprobs, base.logprobs)
            with pytest.raises(StaleVersionError):
                await engine.generate(asked)
            assert await engine.load_adapter(ADAPTER, 7) == digest
            again = await engine.generate(replace(asked, policy_version=7))
            assert np.array_equal(again.logprobs, adapted.logprobs)

    asyncio.run(main())


def _nan(tensors):
    tensors[FACTOR][0, 0] = torch.nan


def _drop(tensors):
    del tensors[FACTOR]


def _wider(tensors):
    tensors[FACTOR] = torch.zeros(33, 4)


def _stranger(tensors):
    tensors["language_model.model.layers.9.self_attn.o_proj.lora_A.weight"] = torch.zeros(4, 32)


@pytest.mark.parametrize("open_engine", ENGINES)
@pytest.mark.parametrize(
    ("config", "edit", "message"),
    [
        ({"r": 8}, None, "r is 8, this engine serves 4"),
        ({"lora_alpha": 4}, None, "lora_alpha is 4"),
        ({"target_modules": ["o_proj"]}, None, "target_modules"),
        (None, _nan, "nan"),
        (None, _drop, "missing"),
        (None, _wider, r"\[33, 4\]"),
        (None, _stranger, "no adapter target"),
    ],
    ids=["rank", "alpha", "targets", "nan", "missing", "other-base-shape", "other-base-layers"],
)
def test_bad_adapter_is_refused_and_the_old_one_served(open_engine, tmp_path, config, edit, message):
    bad = changed_adapter(tmp_path / "bad", config=config, edit=edit)

    async def main():
        async with open_engine() as engine:
            await engine.load_adapter(ADAPTER, 3)
            asked = request("r", prompt(2, 6), version=3)
            before = await engine.generate(asked)
            with pytest.raises(AdapterRefusedError, match=message):
                await engine.load_adapter(bad, 4)
            assert (await engine.health()).policy_version == 3
            assert_same(await engine.generate(asked), before)

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_truncated_or_absent_adapter_is_refused(open_engine, tmp_path):
    cut = changed_adapter(tmp_path / "cut")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    async def main():
        async with open_engine() as engine:
            for directory in (cut, tmp_path / "absent"):
                with pytest.raises(AdapterRefusedError, match=directory.name):
                    await engine.load_adapter(directory, 0)
            assert (await engine.health()).policy_version == -1

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_load_waits_for_running_requests(open_engine):
    """A load in the middle of answers lets them finish with the adapter they started with."""

    async def main():
        async with open_engine() as engine:
            asked = [request(f"w{i}", prompt(i, 6), max_new_tokens=20, stop_token_ids=()) for i in range(4)]
            expected = await generate_all(engine, asked)
            running = [asyncio.create_task(engine.generate(r)) for r in asked]
            await asyncio.sleep(0)
            await engine.load_adapter(ADAPTER, 0)
            for task in running:
                assert task.done()
                assert_same(task.result(), expected[task.result().request_id])

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_abort_returns_what_there_is(open_engine):
    """Running and waiting requests end with ABORT; the others are not disturbed."""

    async def main():
        async with open_engine(Limits(2, 2048, 2048)) as engine:
            asked = [request(f"a{i}", prompt(i, 6), max_new_tokens=40, stop_token_ids=()) for i in range(4)]
            survivor = await engine.generate(asked[1])
            tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
            while (await engine.health()).running < 2:
                await asyncio.sleep(0.001)
            await engine.abort(("a0", "a3", "unknown"))
            done = await asyncio.gather(*tasks)
            assert done[0].finish is FinishReason.ABORT and len(done[0].tokens) < 40
            assert done[0].routing.shape[0] == 5 + len(done[0].tokens)
            assert done[3].finish is FinishReason.ABORT and len(done[3].tokens) == 0
            assert_same(done[1], survivor)
            assert done[2].finish is FinishReason.LENGTH
            health = await engine.health()
            assert (health.running, health.waiting) == (0, 0)
            assert_same(await engine.generate(asked[1]), survivor)

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_cancelled_caller_frees_its_place(open_engine):
    async def main():
        async with open_engine(Limits(1, 1024, 2048)) as engine:
            task = asyncio.create_task(engine.generate(request("c", prompt(1, 6), max_new_tokens=500)))
            while (await engine.health()).running < 1:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for name in ("c", "d"):  # the same id may come again at once
                done = await engine.generate(request(name, prompt(2, 6), max_new_tokens=3, stop_token_ids=()))
                assert len(done.tokens) == 3

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_sleep_frees_and_wake_serves_the_same(open_engine):
    async def main():
        async with open_engine() as engine:
            await engine.load_adapter(ADAPTER, 2)
            asked = request("z", prompt(5, 70), version=2)
            before = await engine.generate(asked)
            await engine.sleep()
            assert not (await engine.health()).awake
            with pytest.raises(EngineError, match="asleep"):
                await engine.generate(asked)
            await engine.wake()
            assert (await engine.health()).awake
            assert_same(await engine.generate(asked), before)

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_restarted_engine_gives_the_same_bits(open_engine):
    asked = request("n", prompt(9, 40), version=1, max_new_tokens=12)

    async def once():
        async with open_engine() as engine:
            await engine.load_adapter(ADAPTER, 1)
            return await engine.generate(asked)

    assert_same(asyncio.run(once()), asyncio.run(once()))


@pytest.mark.parametrize("open_engine", ENGINES)
def test_close_fails_what_waits_and_is_idempotent(open_engine):
    async def main():
        async with open_engine() as engine:
            task = asyncio.create_task(engine.generate(request("x", prompt(1, 6), max_new_tokens=2000)))
            await asyncio.sleep(0.01)
            await engine.close()
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await task
            assert not (await engine.health()).alive
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(request("y", prompt(1, 6)))

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ((), {}, "at least one prompt token"),
        ((1, 2, 96), {}, "96 is outside the vocabulary of 96"),
        ((1, 2, -1), {}, "-1 is outside"),
        ((1, 2), {"max_new_tokens": 4090}, "max_total_tokens|context"),
        ((1, 2), {"max_new_tokens": 0}, "max_new_tokens 0"),
    ],
)
def test_request_that_can_never_run_is_refused(open_engine, tokens, params, message):
    async def main():
        async with open_engine(Limits(4, 1024, 64)) as engine:
            with pytest.raises(ValueError, match=message):
                await engine.generate(request("bad", tokens, **params))
            assert len((await engine.generate(request("good", (1, 2, 3), max_new_tokens=1))).tokens) == 1

    asyncio.run(main())


@pytest.mark.parametrize("open_engine", ENGINES)
def test_two_running_requests_cannot_share_an_id(open_engine):
    async def main():
        async with open_engine() as engine:
            task = asyncio.create_task(engine.generate(request("twin", prompt(1, 6), max_new_tokens=10)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="already running"):
                await engine.generate(request("twin", prompt(1, 6)))
            await task

    asyncio.run(main())
