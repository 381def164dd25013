"""SGLang's own description of a tensor in a flat buffer; the only place that imports SGLang, and only when called."""

from typing import Any, Protocol


class FlatSlot(Protocol):
    """Where a tensor stands in a flat buffer (`k31core.ops.digest.Slot`)."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def offset(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


def flattened_metadata(slot: FlatSlot) -> Any:
    """For `k31core.sync.cuda_ipc`: what the server's `FlattenedTensorBucket` reads. Needs SGLang installed."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    return FlattenedTensorMetadata(
        name=slot.name,
        shape=slot.shape,
        dtype=slot.dtype,
        start_idx=slot.offset,
        end_idx=slot.offset + slot.num_bytes,
        numel=slot.num_bytes,
    )
