"""Handles opened by another process, and broadcasts between real gloo ranks."""

import asyncio
import base64
import multiprocessing as mp
import pickle
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from k31core.ops.digest import Slot, digest_of_tensor
from k31core.sync.buckets import EngineRank
from k31core.sync.cuda_ipc import CudaIpcPublisher, IpcExporter, send_base
from k31core.sync.nccl import Channel, receive, send
from k31core.sync.publisher import SyncError

ADAPTER = load_file(Path(__file__).parents[2] / "cases" / "model" / "tiny-k31-adapter" / "adapter_model.safetensors")


def describe(slot: Slot) -> tuple[str, str, tuple[int, ...], int, int]:
    return slot.name, str(slot.dtype), slot.shape, slot.offset, slot.num_bytes


def open_handle(text: str) -> dict[str, Tensor]:
    """The engine's side."""
    tree = pickle.loads(base64.b64decode(text))
    flat = tree["flattened_tensor"]
    return {
        name: flat[at : at + size].view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
        for name, dtype, shape, at, size in tree["metadata"]
    }


def _engine(connection: Any) -> None:
    """Another process: opens a handle, digests what it sees, answers."""
    torch.set_num_threads(1)
    while (text := connection.recv()) is not None:
        connection.send({name: digest_of_tensor(tensor).hex() for name, tensor in open_handle(text).items()})


class OtherProcess:
    """An engine of two ranks in one child process."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse, self.seen = refuse, list[dict[str, str]]()
        context = mp.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_engine, args=(theirs,))
        self.process.start()

    async def load_adapter_tensors(self, payloads: Sequence[str], version: int, digest: str) -> None:
        if self.refuse:
            raise ValueError("no room for it")
        for text in payloads:
            self.connection.send(text)
            self.seen.append(await asyncio.to_thread(self.connection.recv))

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(timeout=30)
        assert self.process.exitcode == 0


class Trainers:
    """Two trainer ranks, each with the payload of one engine rank."""

    def __init__(self) -> None:
        self.exporters = [IpcExporter(EngineRank(i, 2, 8), lambda n: f"e.{n}", describe) for i in range(2)]
        self.digests: list[dict[str, str]] = []

    async def export(self, version: int) -> list[str]:
        buckets = [list(ADAPTER.items())]
        made = [exporter.export(buckets, version) for exporter in self.exporters]
        self.digests = [{name: d.hex() for name, d in payload.digests.items()} for _, payload in made]
        return [handle for handle, _ in made]

    async def release(self, version: int) -> int:
        return sum(exporter.release(version) for exporter in self.exporters)


def test_another_process_sees_the_same_bytes_and_the_memory_comes_back() -> None:
    trainers, engine = Trainers(), OtherProcess()
    publisher = CudaIpcPublisher(trainers, engine, lambda source: f"digest-of-{source.name}")
    try:
        for version in (1, 2):
            done = asyncio.run(publisher.publish(Path("step-00001"), version))
            assert (done.version, done.digest) == (version, "digest-of-step-00001")
            assert done.bytes > sum(t.numel() * 4 for t in ADAPTER.values())
            assert engine.seen[-2:] == trainers.digests
            assert all(exporter.in_flight.num_bytes == 0 for exporter in trainers.exporters)
    finally:
        engine.close()


def test_a_refusal_frees_the_memory_too() -> None:
    trainers, engine = Trainers(), OtherProcess(refuse=True)
    try:
        with pytest.raises(SyncError, match="version 4: the engine refused the adapter: no room for it"):
            asyncio.run(CudaIpcPublisher(trainers, engine, lambda _: "d").publish(Path("x"), 4))
        assert all(exporter.in_flight.num_bytes == 0 for exporter in trainers.exporters)
    finally:
        engine.close()


def test_the_base_is_streamed_in_pieces() -> None:
    base = {f"layer.{i}": torch.randn(100) for i in range(10)}
    got: dict[str, Tensor] = {}
    calls = 0

    async def take(handle: str) -> None:
        nonlocal calls
        calls += 1
        got.update({name: tensor.clone() for name, tensor in open_handle(handle).items()})

    total = asyncio.run(send_base(base.items(), take, describe, bucket_bytes=1000))
    assert calls == 5
    assert total >= 4000
    assert all(torch.equal(got[name], tensor) for name, tensor in base.items())


def _rank(rank: int, port: int, body: Callable[[int], Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    try:
        results.put((rank, body(rank)))
    except SyncError as error:
        results.put((rank, f"SyncError: {error}"))
    dist.destroy_process_group()


def three_ranks(body: Callable[[int], Any]) -> list[Any]:
    """Run `body` on a sender (rank 0) and two receivers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, body, results)) for r in range(3)]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return [answers[r] for r in range(3)]


CHANNEL = Channel(None, torch.device("cpu"))


def test_every_receiver_gets_every_tensor() -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            return send(ADAPTER, 5, CHANNEL, bucket_bytes=30_000)
        own: dict[str, Tensor] = {}
        engine_rank = EngineRank(rank - 1, 2, 8)
        digests = receive(5, lambda n, t: own.update({n: engine_rank.part(n, t).clone()}), CHANNEL)
        whole = {name: digest_of_tensor(tensor) for name, tensor in ADAPTER.items()}
        same = all(torch.equal(own[n], engine_rank.part(n, t)) for n, t in ADAPTER.items())
        return digests == whole and same and own.keys() == ADAPTER.keys()

    sent, first, second = three_ranks(body)
    assert sent >= sum(t.numel() * 4 for t in ADAPTER.values())
    assert first is True
    assert second is True


def test_a_receiver_that_expects_another_version_stops_all() -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            return send(ADAPTER, 5, CHANNEL, bucket_bytes=1 << 20)
        taken: list[str] = []
        try:
            receive(5 if rank == 1 else 6, lambda n, _: taken.append(n), CHANNEL)
        except SyncError as error:
            return len(taken), str(error)
        return "received"

    sender, good, bad = three_ranks(body)
    assert sender == "SyncError: version 5: 1 receivers did not confirm; publish again, nothing was served"
    assert good[1] == "version 5: 1 receivers did not confirm; publish again, nothing was served"
    assert bad == (0, "version 6: version 5 was sent, version 6 is expected; publish again, nothing was served")


def test_a_dtype_that_is_not_sent() -> None:
    with pytest.raises(SyncError, match=r"a has dtype torch\.float64; sync sends F32, BF16, U8"):
        send({"a": torch.zeros(1, dtype=torch.float64)}, 1, CHANNEL, 100)
