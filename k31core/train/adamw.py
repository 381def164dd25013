"""AdamW over the adapter's factors, with float32 masters where a factor is kept in half precision.

The state is named by logical tensor (`<name>.exp_avg`, `.exp_avg_sq`, `.master`), so a save can be read by any layout.
Plain and in order: the same gradients give the same bits, which an exact resume needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from k31core.parallel.sharding import Slot


class AdapterOptimizer(Protocol):
    """What a step needs of an optimizer; other back ends (sharded, off-loaded) fit behind it."""

    slots: Sequence[Slot]
    """The trained tensors of this rank, each once."""
    updates: int
    """Updates done: Adam's bias correction counts them."""

    def apply(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        """One update from fp32 gradients in the order of `slots`, already reduced and clipped."""
        ...

    def state_slots(self) -> list[Slot]:
        """Every state tensor with its name and shard, for saving and restoring."""
        ...

    def reset(self) -> None:
        """Forget moments and count; masters are read again from the factors."""
        ...


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Numbers of AdamW other than the learning rate."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamW:
    """Decoupled weight decay, bias-corrected moments in fp32 (Loshchilov and Hutter, as in torch.optim.AdamW)."""

    def __init__(self, slots: Sequence[Slot], settings: AdamSettings) -> None:
        self.slots = list(slots)
        self.settings = settings
        self.updates = 0
        self._first = [torch.zeros_like(s.tensor, dtype=torch.float32, requires_grad=False) for s in self.slots]
        self._second = [torch.zeros_like(m) for m in self._first]
        self._masters = [_master(s.tensor) for s in self.slots]

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        """See `AdapterOptimizer`."""
        self.updates += 1
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        step_size = lr / (1 - beta1**self.updates)
        root_correction = (1 - beta2**self.updates) ** 0.5
        for slot, gradient, first, second, master in zip(
            self.slots, gradients, self._first, self._second, self._masters, strict=True
        ):
            value = slot.tensor if master is None else master
            value.mul_(1 - lr * self.settings.weight_decay)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            value.addcdiv_(first, (second.sqrt() / root_correction).add_(self.settings.eps), value=-step_size)
            if master is not None:
                slot.tensor.copy_(master)

    def state_slots(self) -> list[Slot]:
        """See `AdapterOptimizer`."""
        named = []
        for slot, first, second, master in zip(self.slots, self._first, self._second, self._masters, strict=True):
            kinds = {"exp_avg": first, "exp_avg_sq": second}
            if master is not None:
                kinds["master"] = master
            named += [replace(slot, name=f"{slot.name}.{kind}", tensor=tensor) for kind, tensor in kinds.items()]
        return named

    @torch.no_grad()
    def reset(self) -> None:
        """See `AdapterOptimizer`."""
        self.updates = 0
        for first, second in zip(self._first, self._second, strict=True):
            first.zero_()
            second.zero_()
        self._masters = [_master(s.tensor) for s in self.slots]


def _master(factor: Tensor) -> Tensor | None:
    return None if factor.dtype == torch.float32 else factor.detach().float()
