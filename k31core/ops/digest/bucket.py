"""Flat buckets: an adapter's tensors one after another in a few large buffers, so that a sync is a few large copies.

    flattener = Flattener(tensors)             # once: the plan, the buffer and the copy tables
    for bucket in flattener.buckets():         # every sync; bucket.data is reused by the next one
        send(bucket.data, bucket.slots)        # stream order: the next bucket is written after what was queued here
    check_equal(flattener.digests(), theirs)   # digests were computed while copying

Nothing is allocated after the first sync: the buffer, the tables and the sums belong to the flattener.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k31core.ops.digest.tensor import byte_view, digests_of_sums
from k31core.ops.digest.value import Digest, digest_of_bytes

if TYPE_CHECKING:
    from k31core.ops.digest.kernel import CopyPlan

DEFAULT_BUCKET_BYTES = 2 << 30
_ALIGNMENT = 16


class BucketError(ValueError):
    """Tensors that cannot share buckets, or a bucket that does not fit its slots: names the tensor and the sizes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor stands in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the bucket's start, a multiple of 16."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One filled bucket; `data` is valid until the flattener fills the next one."""

    data: Tensor
    """uint8 `[n]`."""
    slots: tuple[Slot, ...]


def plan_buckets(tensors: Mapping[str, Tensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[tuple[Slot, ...]]:
    """Slots of each bucket, tensors in the order of the mapping; a tensor above `bucket_bytes` gets a bucket alone."""
    if bucket_bytes < _ALIGNMENT:
        raise BucketError(f"bucket_bytes must be at least {_ALIGNMENT}, got {bucket_bytes}")
    buckets: list[tuple[Slot, ...]] = []
    current: list[Slot] = []
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if current and end + size > bucket_bytes:
            buckets.append(tuple(current))
            current, end = [], 0
        current.append(Slot(name, tensor.dtype, tuple(tensor.shape), end, size))
        end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
    if current:
        buckets.append(tuple(current))
    return buckets


class Flattener:
    """Fills buckets from a fixed set of tensors (their addresses must not change) and digests them on the way."""

    def __init__(self, tensors: Mapping[str, Tensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            raise BucketError(f"the tensors must be on one device, got {sorted(map(str, devices)) or 'no tensors'}")
        self._device = devices.pop()
        self._views = {name: byte_view(tensor, name) for name, tensor in tensors.items()}
        self._addresses = {name: view.data_ptr() for name, view in self._views.items()}
        self._tensors = dict(tensors)
        self.plan = plan_buckets(tensors, bucket_bytes)
        size = max(_used(slots) for slots in self.plan)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._digests: dict[str, Digest] = {}
        self._sums = [torch.zeros(len(s), 2, dtype=torch.int64, device=self._device) for s in self.plan]
        self._tables = [self._table(slots) for slots in self.plan] if self._device.type == "cuda" else []

    def buckets(self, *, digest: bool = True) -> Iterator[Bucket]:
        """Fill and yield one bucket after another; consume `data` (in stream order) before asking for the next."""
        self._check_addresses()
        for index, slots in enumerate(self.plan):
            data = self._buffer[: _used(slots)]
            if self._tables:
                from k31core.ops.digest.kernel import copy_and_digest

                copy_and_digest(self._tables[index], data, self._sums[index].zero_() if digest else None)
            else:
                for slot in slots:
                    data[slot.offset : slot.offset + slot.num_bytes] = self._views[slot.name]
                    if digest:
                        self._digests[slot.name] = digest_of_bytes(memoryview(self._views[slot.name].numpy()))
            yield Bucket(data, slots)

    def digests(self) -> dict[str, Digest]:
        """Digest of every tensor as it was last copied; waits for the device."""
        if not self._tables:
            return dict(self._digests)
        found: dict[str, Digest] = {}
        for slots, sums in zip(self.plan, self._sums, strict=True):
            found.update(zip((s.name for s in slots), digests_of_sums(sums, [s.num_bytes for s in slots]), strict=True))
        return found

    def _table(self, slots: tuple[Slot, ...]) -> CopyPlan:
        from k31core.ops.digest.kernel import plan_copies

        entries = [(self._addresses[s.name], s.offset, s.num_bytes, 0) for s in slots]
        return plan_copies(entries, self._device)

    def _check_addresses(self) -> None:
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() != self._addresses[name]:
                raise BucketError(f"{name} moved since the flattener was made: make a new one")


def flatten(tensors: Mapping[str, Tensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets of the tensors, once; for repeated syncs keep a `Flattener`."""
    return Flattener(tensors, bucket_bytes).buckets(digest=False)


def unflatten(data: Tensor, slots: tuple[Slot, ...]) -> dict[str, Tensor]:
    """The bucket's tensors by name, as views of `data` (uint8 `[n]`): copy what must outlive the bucket."""
    if data.dtype != torch.uint8 or data.ndim != 1 or data.numel() < _used(slots):
        raise BucketError(
            f"the bucket must be uint8 with at least {_used(slots)} bytes, got {data.dtype} {tuple(data.shape)}"
        )
    return {s.name: data[s.offset : s.offset + s.num_bytes].view(s.dtype).view(s.shape) for s in slots}


def _used(slots: tuple[Slot, ...]) -> int:
    return max((slot.offset + slot.num_bytes for slot in slots), default=0)
