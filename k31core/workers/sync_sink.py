"""The engine's side of a sync by memory, beside the engine's client: handles passed on, or a broadcast received.

A broadcast arrives here, on the engine's cards, and goes on to the servers by handle: SGLang's releases take a base by
broadcast, but no adapter.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k31core.recipe.recipe import Recipe
from k31core.rollout.engine import Engine
from k31core.rollout.engines.sglang.engine import SglangEngine
from k31core.sync.publisher import SyncError

SENDER, RECEIVER = 0, 1


class SyncSink:
    """See the module. Torch is imported only when a broadcast is received."""

    def __init__(self, engine: Engine, recipe: Recipe, num_experts: int) -> None:
        """Raises SyncError for an engine that takes no handles."""
        if not isinstance(engine, SglangEngine):
            raise SyncError(
                f"sync.transport {recipe.sync.transport!r} needs an SGLang engine, this one is a "
                f"{type(engine).__name__}: use 'in_process' or 'shared_files'"
            )
        self._engine, self._recipe, self._num_experts = engine, recipe, num_experts

    async def handles(
        self, payloads: Sequence[str], version: int, digest: str, checksums: Mapping[str, str] | None
    ) -> None:
        """Serve what the handles point at. Raises AdapterRefusedError."""
        await self._engine.load_adapter_tensors(payloads, version, digest, checksums)

    async def receive(self, rendezvous: str, version: int, digest: str) -> dict[str, int]:
        """Take part in the trainer's broadcast and serve what arrived. Raises SyncError or AdapterRefusedError."""
        exporters, payloads, checksums = await asyncio.to_thread(self._receive, rendezvous, version)
        try:
            await self._engine.load_adapter_tensors(payloads, version, digest, checksums)
        finally:
            freed = sum(exporter.release(version) for exporter in exporters)
        return {"freed": freed, "held": sum(exporter.in_flight.num_bytes for exporter in exporters)}

    async def begin_base(self) -> None:
        """The base is about to be sent."""
        await self._engine.begin_base()

    async def base(self, payloads: Sequence[str]) -> None:
        """One piece of it."""
        await self._engine.update_base(payloads)

    async def end_base(self) -> None:
        """All of it was sent."""
        await self._engine.end_base()

    def _receive(self, rendezvous: str, version: int) -> tuple[list[Any], list[str], dict[str, str] | None]:
        """(exporters that keep the memory, a handle for every rank of the engine, checksums when asked for)."""
        import torch

        from k31core.sync.cuda_ipc import IpcExporter, checksums_of
        from k31core.sync.handles import share_by_name
        from k31core.sync.nccl import Channel, receive
        from k31core.workers.sync_source import SGLANG_FORMAT, engine_rank, sglang_name

        cards = self._recipe.train.device == "cuda"
        if not cards:
            share_by_name()
        device = torch.device("cuda", 0) if cards else torch.device("cpu")
        timeout_s = self._recipe.sync.timeout_s
        channel = Channel.join(Path(rendezvous), RECEIVER, RECEIVER + 1, device=device, timeout_s=timeout_s)
        taken: dict[str, torch.Tensor] = {}
        receive(version, lambda name, tensor: taken.update({name: tensor.clone()}), channel)
        exporters, payloads, checksums = [], list[str](), None
        for rank in range(self._recipe.rollout.engine.tp_size):
            own = engine_rank(self._recipe, rank, self._num_experts)
            assert own is not None, "ranks of the one engine"
            place = torch.device("cuda", rank) if cards else device
            exporter = IpcExporter(own, sglang_name, SGLANG_FORMAT)
            handle, payload = exporter.export([[(name, tensor.to(place)) for name, tensor in taken.items()]], version)
            exporters.append(exporter)
            payloads.append(handle)
            if self._recipe.sync.check_lora_weight_equal and checksums is None:
                checksums = checksums_of(payload)
        return exporters, payloads, checksums
