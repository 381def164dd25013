"""Handles opened by another process, and broadcasts between real gloo ranks."""

import asyncio
import base64
import hashlib
import io
import multiprocessing as mp
import pickle
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from k31core.ops.digest import Slot, digest_of_tensor
from k31core.parallel.mesh import Axis, Mesh
from k31core.parallel.sharding import Shard, Stored
from k31core.parallel.sharding import Slot as Slot_
from k31core.sync.buckets import EngineRank, InFlight
from k31core.sync.cuda_ipc import BaseStream, IpcExporter, checksums_of
from k31core.sync.frozen import FrozenTensor, frozen_pieces
from k31core.sync.handle_publisher import HandlePublisher, Handles, Released
from k31core.sync.handles import Foreign, HandleFormat, share_by_name
from k31core.sync.nccl import Channel, receive, send
from k31core.sync.publisher import SyncError

ADAPTER = load_file(Path(__file__).parents[2] / "cases" / "model" / "tiny-k31-adapter" / "adapter_model.safetensors")


def describe(slot: Slot) -> tuple[str, str, tuple[int, ...], int, int]:
    return slot.name, str(slot.dtype), slot.shape, slot.offset, slot.num_bytes


FORM = HandleFormat(describe)


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

    async def load_adapter_tensors(
        self, payloads: Sequence[str], version: int, digest: str, checksums: Any = None
    ) -> None:
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
        self.exporters = [IpcExporter(EngineRank(i, 2, 8), lambda n: f"e.{n}", FORM) for i in range(2)]
        self.digests: list[dict[str, str]] = []
        self.leak = 0

    async def export(self, version: int) -> Handles:
        buckets = [list(ADAPTER.items())]
        made = [exporter.export(buckets, version) for exporter in self.exporters]
        self.digests = [{name: d.hex() for name, d in payload.digests.items()} for _, payload in made]
        return Handles([handle for handle, _ in made])

    async def release(self, version: int) -> Released:
        freed = sum(exporter.release(version) for exporter in self.exporters)
        return Released(freed, sum(exporter.in_flight.num_bytes for exporter in self.exporters) + self.leak)


def test_another_process_sees_the_same_bytes_and_the_memory_comes_back() -> None:
    trainers, engine = Trainers(), OtherProcess()
    publisher = HandlePublisher(trainers, engine, lambda source: f"digest-of-{source.name}")
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
            asyncio.run(HandlePublisher(trainers, engine, lambda _: "d").publish(Path("x"), 4))
        assert all(exporter.in_flight.num_bytes == 0 for exporter in trainers.exporters)
    finally:
        engine.close()


def test_memory_that_does_not_come_back_is_an_error() -> None:
    trainers, engine = Trainers(), OtherProcess()
    trainers.leak = 4096
    try:
        with pytest.raises(SyncError, match="4096 bytes of a publication were not freed: the export leaks"):
            asyncio.run(HandlePublisher(trainers, engine, lambda _: "d").publish(Path("x"), 4))
    finally:
        engine.close()


def test_the_base_is_streamed_one_piece_alive_at_a_time() -> None:
    base = {f"layer.{i}": torch.randn(100) for i in range(10)}
    pieces = [[(name, base[name]) for name in list(base)[at : at + 2]] for at in range(0, 10, 2)]
    kept = InFlight()
    stream = BaseStream(iter(pieces), FORM, kept)
    got: dict[str, Tensor] = {}
    while (handle := stream.next()) is not None:
        assert 800 <= kept.num_bytes < 1000
        got.update({name: tensor.clone() for name, tensor in open_handle(handle).items()})
    assert kept.num_bytes == 0
    assert got.keys() == base.keys() and all(torch.equal(got[name], tensor) for name, tensor in base.items())


def test_classes_of_the_engine_are_written_by_name_and_checksums_are_the_bytes() -> None:
    """The reader's unpickler asks for SGLang's names; nothing of it is installed here."""
    share_by_name()
    form = HandleFormat(lambda slot: Foreign("engine.buckets", "Metadata", describe(slot)))
    exporter = IpcExporter(EngineRank(0, 1, 8), lambda name: name, form)
    handle, payload = exporter.export([list(ADAPTER.items())], 1)
    asked: list[tuple[str, str]] = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.append((module, name))
            return (lambda *fields: fields) if module == "engine.buckets" else super().find_class(module, name)

    tree = Reader(io.BytesIO(base64.b64decode(handle))).load()
    assert ("engine.buckets", "Metadata") in asked
    allowed = {"torch", "torch.multiprocessing.reductions", "torch.storage", "engine.buckets", "builtins"}
    assert {module for module, _ in asked} <= allowed
    flat = tree["flattened_tensor"]
    for name, _, _, at, size in tree["metadata"]:
        assert hashlib.sha256(flat[at : at + size].numpy()).hexdigest() == checksums_of(payload)[name]
    exporter.release(1)


def _rank(rank: int, meeting: Path, body: Callable[[int, Channel], Any], results: Any) -> None:
    torch.set_num_threads(1)
    channel = Channel.join(meeting, rank, 3, device=torch.device("cpu"), timeout_s=60)
    try:
        results.put((rank, body(rank, channel)))
    except SyncError as error:
        results.put((rank, f"SyncError: {error}"))


def three_ranks(folder: Path, body: Callable[[int, Channel], Any]) -> list[Any]:
    """Run `body` on a sender (rank 0) and two receivers; none of them has a default process group."""
    context = mp.get_context("fork")
    results = context.Queue()
    meeting = folder / f"meeting-{uuid.uuid4().hex[:6]}"
    ranks = [context.Process(target=_rank, args=(r, meeting, body, results)) for r in range(3)]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return [answers[r] for r in range(3)]


def buckets(size: int) -> list[list[tuple[str, Tensor]]]:
    """The adapter, `size` tensors at a time."""
    items = list(ADAPTER.items())
    return [items[at : at + size] for at in range(0, len(items), size)]


def test_every_receiver_gets_every_tensor(tmp_path: Path) -> None:
    def body(rank: int, channel: Channel) -> Any:
        if rank == 0:
            return send(buckets(5), 5, channel)
        own: dict[str, Tensor] = {}
        engine_rank = EngineRank(rank - 1, 2, 8)
        digests = receive(5, lambda n, t: own.update({n: engine_rank.part(n, t).clone()}), channel)
        whole = {name: digest_of_tensor(tensor) for name, tensor in ADAPTER.items()}
        same = all(torch.equal(own[n], engine_rank.part(n, t)) for n, t in ADAPTER.items())
        return digests == whole and same and own.keys() == ADAPTER.keys()

    sent, first, second = three_ranks(tmp_path, body)
    assert sent >= sum(t.numel() * 4 for t in ADAPTER.values())
    assert first is True
    assert second is True


def test_a_receiver_that_expects_another_version_stops_all(tmp_path: Path) -> None:
    def body(rank: int, channel: Channel) -> Any:
        if rank == 0:
            return send(buckets(100), 5, channel)
        taken: list[str] = []
        try:
            receive(5 if rank == 1 else 6, lambda n, _: taken.append(n), channel)
        except SyncError as error:
            return len(taken), str(error)
        return "received"

    sender, good, bad = three_ranks(tmp_path, body)
    assert sender == "SyncError: version 5: 1 receivers did not confirm; publish again, nothing was served"
    assert good[1] == "version 5: 1 receivers did not confirm; publish again, nothing was served"
    assert bad == (0, "version 6: version 5 was sent, version 6 is expected; publish again, nothing was served")


def test_a_sender_without_receivers_says_so_in_time(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"rank 0 of 2 did not meet the others at .*meeting within 1 s"):
        Channel.join(tmp_path / "meeting", 0, 2, device=torch.device("cpu"), timeout_s=1)


def test_a_dtype_that_is_not_sent() -> None:
    with pytest.raises(SyncError, match=r"a has dtype torch\.float64; sync sends F32, BF16, U8"):
        send([[("a", torch.zeros(1, dtype=torch.float64))]], 1, Channel(None, torch.device("cpu")))


def _frozen_rank(rank: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mesh = Mesh(stage=Axis(2, rank))
    g = torch.Generator().manual_seed(0)
    split, padded = torch.randn(6, 4, generator=g).bfloat16(), torch.randn(3, generator=g)
    expert = torch.randint(0, 256, (2, 5), generator=g, dtype=torch.uint8)
    whole = [
        FrozenTensor("split", (6, 4), torch.bfloat16),
        FrozenTensor("padded", (8,), torch.float32),
        FrozenTensor("expert", (2, 5), torch.uint8),
    ]
    own = [
        Slot_("split", split[rank * 3 : rank * 3 + 3], Shard((6, 4), Stored.WEIGHT, dim=0, start=rank * 3, length=3)),
        Slot_("padded", padded, Shard((3,), Stored.EXACT, zero_padded_to=8)),
    ]
    if rank == 1:
        own.append(Slot_("expert", expert, Shard((2, 5), Stored.PACKED)))
    pieces = list(frozen_pieces(whole, own, mesh, device=torch.device("cpu"), bucket_bytes=60))
    found = {name: tensor for piece in pieces for name, tensor in piece}
    same = torch.equal(found["split"], split) and torch.equal(found["expert"], expert)
    results.put((len(pieces), same and torch.equal(found["padded"], torch.cat([padded, torch.zeros(5)]))))
    dist.destroy_process_group()


def test_the_base_is_put_together_from_shards_bit_for_bit(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_frozen_rank, args=(r, f"file://{tmp_path}/meet", results)) for r in range(2)]
    for process in ranks:
        process.start()
    assert [results.get(timeout=60) for _ in ranks] == [(2, True), (2, True)]
    for process in ranks:
        process.join(timeout=60)
