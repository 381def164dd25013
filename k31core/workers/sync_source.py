"""A trainer rank's part of a sync by memory: handles for an engine on the same card, or a broadcast to other cards.

Every method is a collective over the trainer ranks (the adapter and the base are put together from their shards, one
bucket at a time), called on all of them at once.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31core.model.decoder import Decoder
from k31core.model.lora import adapter_shapes
from k31core.model.weight_names import adapter_slots, base_slots
from k31core.parallel.mesh import SINGLE
from k31core.parallel.ownership import gather_buckets
from k31core.parallel.sharding import Slot
from k31core.recipe.recipe import Recipe
from k31core.rollout.engines.sglang.adapter_files import sglang_name
from k31core.rollout.engines.sglang.tensors import CUDA_REBUILD, METADATA, metadata_arguments
from k31core.sync.buckets import EngineRank, InFlight
from k31core.sync.cuda_ipc import BaseStream, IpcExporter, checksums_of
from k31core.sync.frozen import frozen_pieces, frozen_tensors
from k31core.sync.handles import Foreign, HandleFormat, share_by_name
from k31core.sync.nccl import SENDER, Channel, send
from k31core.sync.publisher import SyncError
from k31core.train.logical import factor_dtype

SGLANG_FORMAT = HandleFormat(lambda slot: Foreign(*METADATA, metadata_arguments(slot)), CUDA_REBUILD)


class SyncSource:
    """See the module."""

    def __init__(self, decoder: Decoder, recipe: Recipe, rank: int) -> None:
        """rank: of this trainer, over the whole world."""
        self._decoder, self._recipe, self._rank = decoder, recipe, rank
        self._exporter: IpcExporter | None = None
        self._in_flight = InFlight()
        self._base: BaseStream | None = None
        own = engine_rank(recipe, rank, decoder.config.num_experts)
        if own is not None:
            self._exporter = IpcExporter(own, sglang_name, SGLANG_FORMAT)
            self._in_flight = self._exporter.in_flight
        if decoder.build.device.type == "cpu":
            share_by_name()

    def handles(self, version: int) -> dict[str, Any]:
        """The handle for the engine rank on this card; `payload` is None on a rank without one."""
        if self._exporter is None:
            for _ in self._buckets():
                pass
            return {"payload": None, "checksums": None}
        handle, payload = self._exporter.export(self._buckets(), version)
        wanted = self._recipe.sync.check_lora_weight_equal and self._rank == 0
        return {"payload": handle, "checksums": checksums_of(payload) if wanted else None}

    def release(self, version: int) -> dict[str, int]:
        """The engine is done with `version`; what was freed and what is still kept, in bytes."""
        freed = self._exporter.release(version) if self._exporter is not None else 0
        return {"freed": freed, "held": self._in_flight.num_bytes}

    def broadcast(self, version: int, rendezvous: str, receivers: int) -> int:
        """Rank 0 sends the adapter to `receivers` that come to `rendezvous`; the others help to put it together.

        Returns the bytes sent, the same for nobody but rank 0. Raises SyncError when a receiver did not confirm.
        """
        if self._rank != SENDER:
            for _ in self._buckets():
                pass
            return 0
        channel = Channel.join(
            Path(rendezvous),
            SENDER,
            receivers + 1,
            device=self._decoder.build.device,
            timeout_s=self._recipe.sync.timeout_s,
        )
        return send(self._buckets(), version, channel)

    def next_base(self, first: bool) -> str | None:
        """The handle of the next piece of the frozen base, None after the last one; `first` begins anew."""
        if first:
            self._base = BaseStream(self._base_pieces(), SGLANG_FORMAT, self._in_flight)
        assert self._base is not None, "the first piece comes first"
        return self._base.next()

    def _buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        decoder = self._decoder
        assert decoder.build.lora is not None
        shapes = adapter_shapes(decoder.config, decoder.build.lora)
        return gather_buckets(
            {name: shapes[name] for name in sorted(shapes)},
            adapter_slots(decoder),
            decoder.build.mesh,
            dtype=factor_dtype(decoder),
            device=decoder.build.device,
            bucket_bytes=self._recipe.sync.bucket_bytes,
        )

    def _base_pieces(self) -> Iterator[list[tuple[str, Tensor]]]:
        decoder, build = self._decoder, self._decoder.build
        if self._recipe.model.ref_load != "native":
            raise SyncError(
                f"sync.resend_base sends the checkpoint's own experts, model.ref_load {self._recipe.model.ref_load!r} "
                f"trains on converted ones: use 'native', or rollout.engine.lora_base_cpu_backup"
            )
        return frozen_pieces(
            frozen_tensors(whole_base(decoder)),
            base_slots(decoder),
            build.mesh,
            device=build.device,
            bucket_bytes=self._recipe.sync.bucket_bytes,
        )


def whole_base(decoder: Decoder) -> list[Slot]:
    """Slots of every layer's frozen tensors, unsharded and without memory."""
    build = replace(decoder.build, mesh=SINGLE, device=torch.device("meta"))
    return base_slots(Decoder(decoder.config, build, range(decoder.config.num_hidden_layers)))


def engine_rank(recipe: Recipe, rank: int, num_experts: int) -> EngineRank | None:
    """The engine rank on the card of trainer `rank`: cards are counted in the same order. None when there is none."""
    engine = recipe.rollout.engine
    if rank >= engine.tp_size * recipe.num_engines:
        return None
    if recipe.sync.expert_rows == "all":
        return EngineRank(0, 1, num_experts)
    inside = rank % engine.tp_size
    return EngineRank(inside // (engine.tp_size // engine.ep_size), engine.ep_size, num_experts)
