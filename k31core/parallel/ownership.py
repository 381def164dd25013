"""Which rank speaks for a trained tensor, and whole tensors put together from the ranks, a bucket at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from k31core.parallel.mesh import Mesh
from k31core.parallel.sharding import GradSum, Shard, Slot


def is_owner(shard: Shard, mesh: Mesh) -> bool:
    """Whether this rank is the first of those that hold the same part: over all ranks, owned parts tile the tensor."""
    holders = {GradSum.DATA: mesh.data, GradSum.STAGE: mesh.stage, GradSum.EXPERT: mesh.expert_dp}
    assert shard.grad_sum is not None, "only trained tensors have an owner"
    return holders[shard.grad_sum].rank == 0


def owned(slots: Sequence[Slot], mesh: Mesh) -> list[Slot]:
    """The slots this rank writes."""
    return [slot for slot in slots if is_owner(slot.shard, mesh)]


def gather_buckets(
    shapes: Mapping[str, tuple[int, ...]],
    slots: Sequence[Slot],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int = 2 << 30,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Every logical tensor of `shapes`, in its order, whole and on every rank; about `bucket_bytes` exist at a time.

    A collective over all ranks: each calls it with the same `shapes` (the whole adapter's) and its own `slots`. Owners
    put their bits into a buffer of zeros and the buffers are added as integers, so the values arrive bit for bit.
    """
    mine = {slot.name: slot for slot in owned(slots, mesh)}
    for names in _buckets(shapes, dtype, bucket_bytes):
        sizes = [math.prod(shapes[name]) for name in names]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        whole = [part.view(shapes[name]) for name, part in zip(names, flat.split(sizes), strict=True)]
        for name, tensor in zip(names, whole, strict=True):
            if name in mine:
                mine[name].shard.take(tensor).copy_(mine[name].tensor.detach())
        if mesh.stage.size * mesh.pp.size > 1:
            dist.all_reduce(_as_integers(flat))
        yield list(zip(names, whole, strict=True))


def _buckets(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if names and size + nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


def _as_integers(flat: Tensor) -> Tensor:
    """The same memory as integers that gloo and NCCL can add; a wrap-around cannot happen, all but one are zero."""
    wide = torch.int64 if flat.numel() * flat.element_size() % 8 == 0 else torch.uint8
    return flat.view(wide)
