"""Publisher contract: an engine serves the bytes the trainer wrote, or the publication is an error."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.sync.in_process import InProcessPublisher
from k31core.sync.publisher import SyncError
from k31core.sync.shared_files import SharedFilesPublisher
from tests.contract.engine_cases import ADAPTER, assert_same, changed_adapter, embedded, prompt, request

WEIGHTS = "adapter_model.safetensors"


@asynccontextmanager
async def in_process(tmp_path):
    async with embedded() as engine:
        yield InProcessPublisher(engine), [engine]


@asynccontextmanager
async def shared_files(tmp_path):
    async with embedded() as one, embedded() as two:
        yield SharedFilesPublisher(tmp_path / "shared", {"engine 0": one, "engine 1": two}), [one, two]


PUBLISHERS = [pytest.param(in_process, id="in-process"), pytest.param(shared_files, id="shared-files")]


@pytest.mark.parametrize("open_publisher", PUBLISHERS)
def test_every_engine_serves_the_published_version(open_publisher, tmp_path):
    async def main():
        async with open_publisher(tmp_path) as (publisher, engines):
            published = await publisher.publish(ADAPTER, 4)
            assert published.version == 4 and published.digest == digest_of_file(ADAPTER / WEIGHTS)
            assert published.bytes == (ADAPTER / WEIGHTS).stat().st_size and published.seconds > 0
            asked = request("p", prompt(1, 7), version=4, max_new_tokens=4)
            first = await engines[0].generate(asked)
            for engine in engines:
                assert (await engine.health()).policy_version == 4
                assert_same(await engine.generate(asked), first)

    asyncio.run(main())


@pytest.mark.parametrize("open_publisher", PUBLISHERS)
def test_refused_adapter_is_a_sync_error_and_the_old_version_stays(open_publisher, tmp_path):
    bad = changed_adapter(tmp_path / "bad", edit=_poison)

    async def main():
        async with open_publisher(tmp_path) as (publisher, engines):
            await publisher.publish(ADAPTER, 1)
            with pytest.raises(SyncError, match=r"version 2.*nan"):
                await publisher.publish(bad, 2)
            with pytest.raises(SyncError, match="absent"):
                await publisher.publish(tmp_path / "absent", 3)
            for engine in engines:
                assert (await engine.health()).policy_version == 1

    asyncio.run(main())


def _poison(tensors):
    next(iter(tensors.values())).view(-1)[3] = torch.nan


class Liar:
    """An engine that holds other bytes than it was given, or never answers."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    async def load_adapter(self, directory, version):
        await asyncio.sleep(self.seconds)
        return "0" * 64


def test_other_bytes_in_the_engine_are_found(tmp_path):
    with pytest.raises(SyncError, match="the engine confirmed adapter 0000000000000000"):
        asyncio.run(InProcessPublisher(Liar()).publish(ADAPTER, 1))

    async def main():
        async with embedded() as honest:
            publisher = SharedFilesPublisher(tmp_path / "shared", {"engine 0": honest, "engine 1": Liar()})
            with pytest.raises(SyncError, match="engine 1 confirmed"):
                await publisher.publish(ADAPTER, 1)

    asyncio.run(main())


def test_engine_that_does_not_answer_is_named(tmp_path):
    publisher = SharedFilesPublisher(tmp_path / "shared", {"engine 7": Liar(seconds=60)}, timeout_s=0.05)
    with pytest.raises(SyncError, match="engine 7 has not confirmed"):
        asyncio.run(publisher.publish(ADAPTER, 1))


def test_old_versions_leave_the_shared_directory(tmp_path):
    async def main():
        async with embedded() as engine:
            publisher = SharedFilesPublisher(tmp_path / "shared", {"engine 0": engine}, keep=2)
            for version in range(4):
                await publisher.publish(ADAPTER, version)
            await publisher.publish(ADAPTER, 3)

    asyncio.run(main())
    assert sorted(p.name for p in (tmp_path / "shared").iterdir()) == ["version-000002", "version-000003"]
