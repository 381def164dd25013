"""SGLang's names for what a handle of ours holds; nothing of it is imported.

Its unpickler admits exactly these (`SafeUnpickler`, 0.5.23).
"""

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


METADATA = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
CUDA_REBUILD = ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
"""Opens CUDA memory whose card is named by UUID."""


def metadata_arguments(slot: FlatSlot) -> tuple[Any, ...]:
    """(name, shape, dtype, first byte, last byte + 1, bytes) of `FlattenedTensorMetadata`."""
    return slot.name, slot.shape, slot.dtype, slot.offset, slot.offset + slot.num_bytes, slot.num_bytes
