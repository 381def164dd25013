"""The frozen base put together from the trainer ranks' shards, some GiB at a time, bit for bit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k31core.parallel.mesh import Mesh
from k31core.parallel.sharding import Slot

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    """As the file has it (`A_log` is padded there)."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


def frozen_tensors(slots: Sequence[Slot]) -> list[FrozenTensor]:
    """The whole model's tensors from the slots of a decoder with every layer (on `meta`)."""
    found = []
    for slot in slots:
        shape = slot.shard.shape
        if slot.shard.zero_padded_to is not None:
            shape = (slot.shard.zero_padded_to, *shape[1:])
        found.append(FrozenTensor(slot.name, shape, slot.tensor.dtype))
    return found


def frozen_pieces(
    whole: Sequence[FrozenTensor], own: Sequence[Slot], mesh: Mesh, *, device: torch.device, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Every tensor of `whole`, complete on every rank, about `bucket_bytes` at a time; a collective over all ranks.

    Each rank puts the parts it holds into a buffer of zeros, and the largest byte of all ranks is kept: ranks that hold
    the same part have the same bytes, so the values arrive bit for bit.
    """
    mine = {slot.name: slot for slot in own}
    for piece in _pieces(whole, bucket_bytes):
        starts, end = list[int](), 0
        for tensor in piece:
            starts.append(end)
            end += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        flat = torch.zeros(end, dtype=torch.uint8, device=device)
        views = []
        for tensor, start in zip(piece, starts, strict=True):
            view = flat[start : start + tensor.num_bytes].view(tensor.dtype).view(tensor.shape)
            slot = mine.get(tensor.name)
            if slot is not None:
                logical = view if slot.shard.zero_padded_to is None else view[: slot.shard.shape[0]]
                slot.shard.take(logical).copy_(slot.tensor.detach())
            views.append((tensor.name, view))
        if mesh.stage.size * mesh.pp.size > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        yield views


def _pieces(whole: Sequence[FrozenTensor], limit: int) -> Iterator[list[FrozenTensor]]:
    piece: list[FrozenTensor] = []
    size = 0
    for tensor in whole:
        if piece and size + tensor.num_bytes > limit:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.num_bytes
    if piece:
        yield piece
