"""Publish to engines on other cards: flat buckets broadcast over a group of its own (NCCL; gloo on CPU).

    sender (rank 0 of the group)                 receivers
      for every bucket:
        header: version, slots          ──────►    allocate the bucket
        bytes                           ──────►    take each tensor out, digest it
      end: digests                      ──────►    compare; then confirm (a sum of flags)

The sender holds its own tensors and two buckets, a receiver one bucket and what it keeps of it.
"""

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from k31core.ops.digest import Digest, DigestMismatch, Slot, check_equal, digest_of_tensor, unflatten
from k31core.sync.buckets import one_bucket
from k31core.sync.publisher import SyncError

SENDER = 0
"""Rank of the sender within the group."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Take = Callable[[str, Tensor], None]
"""Gets each tensor while its bucket exists: copies what it keeps."""


class Channel:
    """Who talks to whom: a process group beside the trainer's own, since the engine's side is no trainer rank."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """group: a backend of torch.distributed; use `join`."""
        self._group, self.device = group, device

    @classmethod
    def join(cls, rendezvous: Path, rank: int, size: int, *, device: torch.device, timeout_s: float) -> Self:
        """Wait for the others at a file that all of them see. Raises SyncError when they do not come in time."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(rendezvous), size)
        store.set_timeout(timeout)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                return cls(dist.ProcessGroupNCCL(store, rank, size, options), device)
            return cls(dist.ProcessGroupGloo(store, rank, size, timeout), device)
        except (RuntimeError, dist.DistError) as error:
            raise SyncError(
                f"rank {rank} of {size} did not meet the others at {rendezvous} within {timeout_s:g} s "
                f"(sync.timeout_s): {error}"
            ) from error

    def broadcast(self, tensor: Tensor) -> None:
        """The sender's bytes on every rank."""
        self._group.broadcast(tensor, SENDER).wait()

    def sum(self, tensor: Tensor) -> None:
        """Over all ranks, in place."""
        self._group.allreduce([tensor]).wait()


def send(buckets: Iterable[list[tuple[str, Tensor]]], version: int, channel: Channel) -> int:
    """Sender's side of one version; returns the bytes. Raises SyncError when a receiver did not confirm."""
    total, digests = 0, dict[str, list[int]]()
    for bucket in buckets:
        for name, tensor in bucket:
            if tensor.dtype not in _NAMES:
                raise SyncError(f"{name} has dtype {tensor.dtype}; sync sends {', '.join(_DTYPES)}")
            digest = digest_of_tensor(tensor.contiguous())
            digests[name] = [digest.low, digest.high, digest.num_bytes]
        flat = one_bucket({name: tensor.contiguous() for name, tensor in bucket})
        slots = [(s.name, _NAMES[s.dtype], s.shape, s.offset, s.num_bytes) for s in flat.slots]
        _send_json({"version": version, "slots": slots}, channel)
        channel.broadcast(flat.data)
        total += flat.data.numel()
    _send_json({"version": version, "digests": digests}, channel)
    _require_confirmation(version, channel, None)
    return total


def receive(version: int, take: Take, channel: Channel) -> dict[str, Digest]:
    """Receiver's side; returns the digests of what arrived, which are the sender's.

    Raises SyncError for another version or damaged data, on this rank and on all others.
    """
    received: dict[str, Digest] = {}
    while "digests" not in (header := _receive_json(channel)):
        slots = tuple(Slot(n, _DTYPES[d], tuple(shape), at, size) for n, d, shape, at, size in header["slots"])
        end = max(slot.offset + slot.num_bytes for slot in slots)
        data = torch.empty(-(-end // 16) * 16, dtype=torch.uint8, device=channel.device)[:end]
        channel.broadcast(data)
        for name, tensor in unflatten(data, slots).items():
            received[name] = digest_of_tensor(tensor)
            if header["version"] == version:
                take(name, tensor)
    problem = None
    if header["version"] != version:
        problem = f"version {header['version']} was sent, version {version} is expected"
    else:
        try:
            check_equal({name: Digest(*values) for name, values in header["digests"].items()}, received)
        except DigestMismatch as error:
            problem = str(error)
    _require_confirmation(version, channel, problem)
    return received


def _send_json(tree: object, channel: Channel) -> None:
    data = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8).to(channel.device)
    channel.broadcast(torch.tensor([data.numel()], device=channel.device))
    channel.broadcast(data)


def _receive_json(channel: Channel) -> dict[str, Any]:
    size = torch.zeros(1, dtype=torch.int64, device=channel.device)
    channel.broadcast(size)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=channel.device)
    channel.broadcast(data)
    tree: dict[str, Any] = json.loads(bytes(data.cpu().numpy()))
    return tree


def _require_confirmation(version: int, channel: Channel, problem: str | None) -> None:
    """Every rank learns whether all are fine: an engine that did not confirm must not serve the next step."""
    failed = torch.tensor([0 if problem is None else 1], device=channel.device)
    channel.sum(failed)
    count = int(failed.item())
    if problem is not None:
        raise SyncError(f"version {version}: {problem}; publish again, nothing was served")
    if count:
        raise SyncError(f"version {version}: {count} receivers did not confirm; publish again, nothing was served")
