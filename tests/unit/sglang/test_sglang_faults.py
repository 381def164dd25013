"""What a server can do wrong, over real HTTP: the stand-in with one fault at a time, each named within its deadline."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from fastapi import Response
from safetensors.torch import load_file

from k31core.model.build import LoraSpec
from k31core.recipe.load import load_recipe, resolve
from k31core.rollout.engine import AdapterRefusedError, EngineError, StaleVersionError
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from k31core.rollout.engines.sglang.adapter_files import sglang_name
from k31core.rollout.engines.sglang.engine import SglangEngine
from k31core.rollout.engines.sglang.open import open_sglang
from k31core.rollout.engines.sglang.payload import PayloadError
from k31core.sync.buckets import EngineRank, InFlight
from k31core.sync.cuda_ipc import BaseStream, IpcExporter, checksums_of
from k31core.sync.handle_publisher import HandlePublisher, Handles, Released
from k31core.sync.handles import share_by_name
from k31core.sync.publisher import SyncError
from k31core.workers.sync_source import SGLANG_FORMAT
from tests.contract.engine_cases import ADAPTER, ALPHA, LIMITS, MODEL, RANK, assert_same, prompt, request
from tests.sglang_standin.engines import recipe_overrides
from tests.sglang_standin.server import Standin, error, serving, update


class Faulty(Standin):
    """The stand-in, misbehaving as `fault` says, `times` times."""

    fault, times, seen, peak, running = "", 0, 0, 0, 0
    adapter_fault = ""
    calls: list[str]

    async def generate(self, body: dict[str, Any]) -> Response:
        self.seen += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if self.times <= 0:
                return await super().generate(body)
            self.times -= 1
            if self.fault == "500":
                return error(500, "CUDA error: an illegal memory access was encountered")
            if self.fault == "hang":
                await asyncio.sleep(60)
            response = await super().generate(body)
            if self.fault == "answer lost":  # computed, then the connection breaks
                return error(502, "bad gateway")
            tree = orjson.loads(response.body)
            change(tree, self.fault)
            return Response(orjson.dumps(tree))
        finally:
            self.running -= 1

    async def load(self, body: dict[str, Any]) -> Response:
        if self.adapter_fault and self.times > 0:
            self.times -= 1
            return update(400, self.adapter_fault)
        return await super().load(body)

    async def release(self, body: dict[str, Any]) -> Response:
        self.calls.append(f"release {sorted(body['tags'])}")
        return await super().release(body)

    async def resume(self, body: dict[str, Any]) -> Response:
        self.calls.append(f"resume {sorted(body['tags'])}")
        return await super().resume(body)


def change(tree: dict[str, Any], fault: str) -> None:
    meta = tree["meta_info"]
    if fault == "rows":
        meta["output_top_logprobs_shape"][0] -= 1
    elif fault == "nan":
        meta["output_token_logprobs"][1][0] = None
    elif fault == "version":
        meta["weight_version"] = "another"
    elif fault == "garbage":
        tree.clear()


@asynccontextmanager
async def faulty(*overrides: str, servers: int = 1) -> AsyncIterator[tuple[SglangEngine, list[Faulty]]]:
    async with contextlib.AsyncExitStack() as stack:
        standins, urls = [], []
        for _ in range(servers):
            inner = await EmbeddedEngine.open(MODEL, EmbeddedOptions(LIMITS, LoraSpec(RANK, ALPHA)))
            stack.push_async_callback(inner.close)
            standin = Faulty(inner, LoraSpec(RANK, ALPHA))
            standin.calls = []
            standins.append(standin)
            urls.append(await stack.enter_async_context(serving(standin)))
        changes = [*recipe_overrides(urls, LIMITS), *overrides]
        engine = await open_sglang(resolve(load_recipe("tiny", changes)), MODEL)
        stack.push_async_callback(engine.close)
        yield engine, standins


ASKED = request("a", prompt(1, 6), stop_token_ids=(), max_new_tokens=5)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("500", EngineError, r"request a \(sent as a\.\d+\): http://.*/generate answered 500: CUDA error: an illegal"),
        ("rows", PayloadError, r"request a, server http://.*candidates have shape \[4, 8\].*expected \[5, 8\]"),
        ("nan", PayloadError, r"request a, .*: log-prob nan at position 1"),
        ("version", StaleVersionError, r"answered by weights 'another', version -1 needs 'default'"),
        ("garbage", PayloadError, r"request a, .*is not what SGLang's /generate sends"),
    ],
)
def test_faults_of_an_answer(fault: str, kind: type[Exception], message: str) -> None:
    async def main() -> None:
        async with faulty("rollout.engine.request_retries=0") as (engine, (server,)):
            server.fault, server.times = fault, 1
            with pytest.raises(kind, match=message):
                await engine.generate(ASKED)
            assert len((await engine.generate(ASKED)).tokens) == 5

    asyncio.run(main())


def test_a_hang_ends_at_its_deadline_and_is_not_tried_again() -> None:
    async def main() -> None:
        async with faulty("rollout.engine.request_timeout_s=1") as (engine, (server,)):
            server.fault, server.times = "hang", 9
            started = time.monotonic()
            with pytest.raises(EngineError, match=r"no answer within 1 s; the server hangs"):
                await engine.generate(ASKED)
            assert time.monotonic() - started < 10
            assert server.seen == 1

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["500", "answer lost"])
def test_a_lost_request_is_sent_again_and_counts_once(fault: str) -> None:
    """Every attempt has its own id; the one result equals that of an undisturbed request."""

    async def main() -> None:
        async with faulty("rollout.engine.request_retries=2") as (engine, (server,)):
            expected = await engine.generate(ASKED)
            server.fault, server.times = fault, 2
            many = [replace(ASKED, request_id=f"a{i}") for i in range(3)]
            done = await asyncio.gather(*(engine.generate(one) for one in many))
            assert [c.request_id for c in done] == ["a0", "a1", "a2"]
            assert server.seen == 1 + 3 + 2
            assert len({body["rid"] for body in server.requests}) == len(server.requests)
            for completion in done:
                assert np.array_equal(completion.tokens, expected.tokens)
            assert (await engine.health()).running == 0

    asyncio.run(main())


def test_a_refusal_is_not_tried_again() -> None:
    async def main() -> None:
        async with faulty() as (engine, (server,)):
            server.loaded = "someone-elses"
            with pytest.raises(EngineError, match=r"answered 400: LoRA adapter None is not loaded"):
                await engine.generate(ASKED)
            assert server.seen == 1

    asyncio.run(main())


def test_no_more_requests_at_once_than_the_recipe_says() -> None:
    async def main() -> None:
        async with faulty("rollout.engine.max_concurrent_requests=3") as (engine, (server,)):
            many = [replace(ASKED, request_id=f"a{i}") for i in range(12)]
            await asyncio.gather(*(engine.generate(one) for one in many))
            assert server.peak <= 3
            assert server.seen == 12

    asyncio.run(main())


def test_an_adapter_the_server_refuses_leaves_the_old_one() -> None:
    async def main() -> None:
        async with faulty() as (engine, (server,)):
            await engine.load_adapter(ADAPTER, 0)
            asked = replace(ASKED, policy_version=0)
            before = await engine.generate(asked)
            server.adapter_fault, server.times = "not enough memory for the adapter", 1
            with pytest.raises(
                AdapterRefusedError, match=r"the server refused it, the old one is served: .*not enough"
            ):
                await engine.load_adapter(ADAPTER, 1)
            assert_same(await engine.generate(asked), before)
            assert sorted(p.name for p in ADAPTER.parent.glob(".*sglang*")) == []

    asyncio.run(main())


def test_neither_new_nor_old_adapter_stops_the_engine() -> None:
    async def main() -> None:
        async with faulty() as (engine, (server,)):
            await engine.load_adapter(ADAPTER, 0)
            server.adapter_fault, server.times = "disk gone", 9
            with pytest.raises(EngineError, match=r"neither the new nor the old adapter could be loaded.*restart"):
                await engine.load_adapter(ADAPTER, 1)
            with pytest.raises(EngineError, match="the engine failed and must be restarted"):
                await engine.generate(replace(ASKED, policy_version=0))
            assert not (await engine.health()).alive

    asyncio.run(main())


def test_two_servers_share_the_requests_and_both_get_the_adapter() -> None:
    async def main() -> None:
        overrides = ("cluster.num_nodes=1", "cluster.gpus_per_node=2")
        async with faulty(*overrides, servers=2) as (engine, servers):
            await engine.load_adapter(ADAPTER, 5)
            many = [replace(ASKED, request_id=f"a{i}", policy_version=5) for i in range(8)]
            done = await asyncio.gather(*(engine.generate(one) for one in many))
            assert [server.loaded for server in servers] == ["k31-v5-1", "k31-v5-1"]
            own = [len([b for b in s.requests if b["rid"].startswith("a")]) for s in servers]
            assert own == [4, 4]
            assert all(np.array_equal(c.logprobs, done[0].logprobs) for c in done)

    asyncio.run(main())


class OneTrainer:
    """A trainer of one rank, as far as the publisher sees it."""

    def __init__(self, checked: bool = False) -> None:
        share_by_name()
        self.exporter, self.checked = IpcExporter(EngineRank(0, 1, 8), sglang_name, SGLANG_FORMAT), checked
        self.damage: dict[str, str] = {}

    async def export(self, version: int) -> Handles:
        tensors = list(load_file(ADAPTER / "adapter_model.safetensors").items())
        handle, payload = self.exporter.export([tensors], version)
        return Handles([handle], {**checksums_of(payload), **self.damage} if self.checked else None)

    async def release(self, version: int) -> Released:
        return Released(self.exporter.release(version), self.exporter.in_flight.num_bytes)


def test_an_adapter_by_handle_is_the_adapter_from_its_directory() -> None:
    """The colocated path end to end: exporter, handle, publisher, engine; then a refusal leaves no adapter."""

    async def main() -> None:
        async with faulty() as (engine, (server,)):
            await engine.load_adapter(ADAPTER, 0)
            expected = await engine.generate(replace(ASKED, policy_version=0))
            trainer = OneTrainer()
            publisher = HandlePublisher(trainer, engine, lambda _: "d" * 64)
            await publisher.publish(ADAPTER, 1)
            assert server.weight_version == "k31-v1-2-" + "d" * 16
            done = await engine.generate(replace(ASKED, policy_version=1))
            assert np.array_equal(done.logprobs, expected.logprobs)
            assert trainer.exporter.in_flight.num_bytes == 0
            server.loaded = None
            with pytest.raises(SyncError, match=r"version 2: the engine refused .*no adapter is served, publish again"):
                await publisher.publish(ADAPTER, 2)
            assert trainer.exporter.in_flight.num_bytes == 0
            assert (await engine.health()).policy_version == -1

    asyncio.run(main())


def test_every_tensor_is_compared_on_both_sides_when_asked_for() -> None:
    async def main() -> None:
        async with faulty() as (engine, _):
            trainer = OneTrainer(checked=True)
            publisher = HandlePublisher(trainer, engine, lambda _: "d" * 64)
            await publisher.publish(ADAPTER, 0)
            name = next(iter(checksums_of(trainer.exporter.export([[("a.x", torch.ones(1))]], 9)[1])))
            trainer.exporter.release(9)
            trainer.damage = {name: "0" * 64}
            with pytest.raises(SyncError, match=r"LORA-CHECK\] adapter sync MISMATCH: \['base_model.model.a.x'\]"):
                await publisher.publish(ADAPTER, 1)

    asyncio.run(main())


def test_handles_are_shared_out_over_two_servers() -> None:
    async def main() -> None:
        async with faulty("cluster.num_nodes=1", "cluster.gpus_per_node=2", servers=2) as (engine, servers):
            one, two = OneTrainer(), OneTrainer()
            payloads = [*(await one.export(3)).payloads, *(await two.export(3)).payloads]
            await engine.load_adapter_tensors(payloads, 3, "d" * 64)
            assert [server.loaded for server in servers] == ["k31-v3-1", "k31-v3-1"]
            with pytest.raises(EngineError, match="3 handles do not divide over 2 servers"):
                await engine.load_adapter_tensors([*payloads, payloads[0]], 4, "d" * 64)

    asyncio.run(main())


def test_sleep_and_wake_in_order() -> None:
    async def main() -> None:
        async with faulty() as (engine, (server,)):
            await engine.sleep()
            await engine.sleep()
            await engine.wake()
            await engine.wake()
            assert server.calls == [
                "release ['cuda_graph', 'kv_cache', 'weights']",
                "resume ['weights']",
                "resume ['cuda_graph', 'kv_cache']",
            ]

    asyncio.run(main())


def test_without_a_host_copy_the_base_must_be_sent_before_the_engine_wakes() -> None:
    async def main() -> None:
        async with faulty(
            "rollout.engine.lora_base_cpu_backup=false", "sync.resend_base=true", "sync.transport=cuda_ipc"
        ) as (engine, (server,)):
            server.keeps_base = False
            before = await engine.generate(ASKED)
            base = {name: slot.tensor.detach().clone() for name, slot in server._base().items()}
            await engine.sleep()
            assert not any(slot.tensor.any() for slot in server._base().values()), "the stand-in forgets its base"
            with pytest.raises(EngineError, match=r"keep no copy .* between begin_base\(\) and end_base\(\)"):
                await engine.wake()
            share_by_name()
            items, kept = list(base.items()), InFlight()
            pieces = [items[at : at + 40] for at in range(0, len(items), 40)]
            await engine.begin_base()
            await send_pieces(engine, pieces[:-1], kept)
            with pytest.raises(EngineError, match=r"\d+ weights did not come, first language_model"):
                await engine.end_base()
            await engine.begin_base()
            await send_pieces(engine, pieces, kept)
            await engine.end_base()
            assert kept.num_bytes == 0
            await engine.wake()
            assert server.calls[1:] == ["resume ['weights']", "resume ['cuda_graph', 'kv_cache']"]
            assert_same(await engine.generate(ASKED), before)

    asyncio.run(main())


async def send_pieces(engine: SglangEngine, pieces: list[Any], kept: InFlight) -> None:
    stream = BaseStream(iter(pieces), SGLANG_FORMAT, kept)
    while (handle := stream.next()) is not None:
        await engine.update_base([handle])


def test_settings_other_than_the_recipes_are_refused_at_the_start() -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match=r"--max-lora-rank: the server has 4, train\.lora\.rank is 8; restart it"):
            async with faulty("train.lora.rank=8"):
                raise AssertionError("opened")

    asyncio.run(main())


def test_no_server_is_an_error_that_names_it() -> None:
    async def main() -> None:
        overrides = [*recipe_overrides(["http://127.0.0.1:9"], LIMITS), "rollout.engine.startup_timeout_s=1"]
        recipe = load_recipe("tiny", overrides)
        with pytest.raises(EngineError, match=r"no answer within 1 s .*http://127\.0\.0\.1:9/health: connection lost"):
            await open_sglang(resolve(recipe), MODEL)

    asyncio.run(main())
