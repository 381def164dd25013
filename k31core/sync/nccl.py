"""Publish to engines on other cards: flat buckets broadcast over a process group (NCCL; gloo on CPU).

    sender (rank 0 of the group)                 receivers
      header: version, buckets, slots   ──────►    allocate one bucket
      bucket 0, 1, …                    ──────►    take each tensor out, digest it
      digests                           ──────►    compare; then confirm (all-reduce of a flag)

The sender holds its own tensors and one bucket, a receiver one bucket and what it keeps of it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k31core.ops.digest import Digest, DigestMismatch, Flattener, Slot, check_equal, digest_of_tensor, unflatten
from k31core.sync.publisher import SyncError

SENDER = 0
"""Rank of the sender within the group."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Take = Callable[[str, Tensor], None]
"""Gets each tensor while its bucket exists: copies what it keeps."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Who talks to whom, and with which tensors."""

    group: dist.ProcessGroup | None
    """None is the default group."""
    device: torch.device

    @property
    def sender(self) -> int:
        """Global rank of the sender."""
        return SENDER if self.group is None else dist.get_global_rank(self.group, SENDER)


def send(tensors: Mapping[str, Tensor], version: int, channel: Channel, bucket_bytes: int) -> int:
    """Sender's side of one version; returns the bytes. Raises SyncError when a receiver did not confirm."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise SyncError(f"{name} has dtype {tensor.dtype}; sync sends {', '.join(_DTYPES)}")
    flattener = Flattener(tensors, bucket_bytes)
    plan = [[(s.name, _NAMES[s.dtype], s.shape, s.offset, s.num_bytes) for s in slots] for slots in flattener.plan]
    _send_json({"version": version, "plan": plan}, channel)
    total = 0
    for bucket in flattener.buckets():
        dist.broadcast(bucket.data, channel.sender, group=channel.group)
        total += bucket.data.numel()
    digests = {name: [d.low, d.high, d.num_bytes] for name, d in flattener.digests().items()}
    _send_json({"digests": digests}, channel)
    _require_confirmation(True, version, channel)
    return total


def receive(version: int, take: Take, channel: Channel) -> dict[str, Digest]:
    """Receiver's side; returns the digests of what arrived, which are the sender's.

    Raises SyncError for another version or damaged data, on this rank and on all others.
    """
    header = _receive_json(channel)
    plan = [
        tuple(Slot(name, _DTYPES[dtype], tuple(shape), offset, size) for name, dtype, shape, offset, size in slots)
        for slots in header["plan"]
    ]
    sizes = [max(slot.offset + slot.num_bytes for slot in slots) for slots in plan]
    buffer = torch.empty(max(sizes), dtype=torch.uint8, device=channel.device)
    received: dict[str, Digest] = {}
    for slots, size in zip(plan, sizes, strict=True):
        dist.broadcast(buffer[:size], channel.sender, group=channel.group)
        for name, tensor in unflatten(buffer[:size], slots).items():
            received[name] = digest_of_tensor(tensor)
            if header["version"] == version:
                take(name, tensor)
    sent = {name: Digest(*values) for name, values in _receive_json(channel)["digests"].items()}
    problem = None
    if header["version"] != version:
        problem = f"version {header['version']} was sent, version {version} is expected"
    else:
        try:
            check_equal(sent, received)
        except DigestMismatch as error:
            problem = str(error)
    _require_confirmation(problem is None, version, channel, problem)
    return received


def _send_json(tree: object, channel: Channel) -> None:
    data = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8).to(channel.device)
    dist.broadcast(torch.tensor([data.numel()], device=channel.device), channel.sender, group=channel.group)
    dist.broadcast(data, channel.sender, group=channel.group)


def _receive_json(channel: Channel) -> dict[str, Any]:
    size = torch.zeros(1, dtype=torch.int64, device=channel.device)
    dist.broadcast(size, channel.sender, group=channel.group)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=channel.device)
    dist.broadcast(data, channel.sender, group=channel.group)
    tree: dict[str, Any] = json.loads(bytes(data.cpu().numpy()))
    return tree


def _require_confirmation(fine: bool, version: int, channel: Channel, problem: str | None = None) -> None:
    """Every rank learns whether all are fine: an engine that did not confirm must not serve the next step."""
    failed = torch.tensor([0 if fine else 1], device=channel.device)
    dist.all_reduce(failed, group=channel.group)
    count = int(failed.item())
    if problem is not None:
        raise SyncError(f"version {version}: {problem}; publish again, nothing was served")
    if count:
        raise SyncError(f"version {version}: {count} receivers did not confirm; publish again, nothing was served")
