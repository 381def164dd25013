"""How a logical tensor (the checkpoint's, or the adapter's) lies on the ranks.

A module says of each of its tensors which part of the logical tensor it is (`Shard`); a `Slot` joins that with the
logical name and the memory to fill. Readers and writers see slots only, so they need to know no model and no layout.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Stored(StrEnum):
    """How a tensor may be stored in the checkpoint."""

    WEIGHT = "weight"
    """BF16."""
    SMALL = "small"
    """A norm, a router or a convolution: BF16 or F32."""
    EXACT = "exact"
    """F32 only."""
    PACKED = "packed"
    """U8: MXFP4 codes."""
    SCALE = "scale"
    """U8: E8M0 scales, byte 255 refused."""
    FACTOR = "factor"
    """A LoRA factor: F32 or BF16."""


class GradSum(StrEnum):
    """Over which ranks the gradient of a trainable tensor is summed, beyond the microbatches of this one."""

    DATA = "data"
    """Sharded over TP: each TP rank owns a part. Sum over DP x CP."""
    STAGE = "stage"
    """The same tensor on every rank of the stage, each with a part of the gradient. Sum over TP x CP x DP."""
    EXPERT = "expert"
    """Owned with the experts. Sum over the ranks that hold the same experts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a logical tensor that one rank holds: everything, or a range of one dimension."""

    shape: tuple[int, ...]
    """Logical shape."""
    stored: Stored
    dim: int | None = None
    start: int = 0
    length: int = 0
    """Entries of `dim` held; unused when `dim` is None."""
    zero_padded_to: int | None = None
    """The file holds this many entries of dimension 0, zero past the logical ones (`A_log`)."""
    grad_sum: GradSum | None = None
    """None for what is never trained in parallel."""

    @property
    def whole(self) -> bool:
        """This rank holds all of the tensor."""
        return self.dim is None or self.length == self.shape[self.dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of a full logical tensor (a view)."""
        return full if self.dim is None else full.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Slot:
    """A logical tensor's place on this rank."""

    name: str
    """Logical name, e.g. `language_model.model.norm.weight`."""
    tensor: Tensor
    """Memory of `shard.local_shape`; filled in place."""
    shard: Shard
