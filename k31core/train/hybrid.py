"""AdamW with a share of its state on the host, through megatron-core's hybrid optimizer. One CUDA device a rank.

Gradients go to the host and updated factors come back on streams of their own (`overlap`), a factor at a time. Numbers
are those of `AdamW` up to rounding; `precision_aware` changes where fp32 masters live:

    off   an fp32 copy of every factor on the GPU is what the hybrid optimizer updates: 4 bytes a parameter more there
    on    the hybrid optimizer holds the masters itself, beside the state (on the host for the off-loaded share), and
          takes the fp32 gradient next to the half-precision factor (`decoupled_grad`)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k31core.parallel.sharding import Slot
from k31core.train.adamw import AdamSettings


class HybridAdamW:
    """An `AdapterOptimizer` (see `k31core.train.adamw`)."""

    def __init__(
        self,
        slots: Sequence[Slot],
        settings: AdamSettings,
        *,
        offload_fraction: float,
        overlap: bool,
        precision_aware: bool,
    ) -> None:
        """Factors are off-loaded in slot order until `offload_fraction` of the entries are on the host."""
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

        self.slots = list(slots)
        self._copies = [_fp32_copy(s.tensor) if not precision_aware else None for s in self.slots]
        self._trained = [s.tensor if c is None else c for s, c in zip(self.slots, self._copies, strict=True)]
        self._inner: Any = HybridDeviceOptimizer(
            self._trained,
            offload_fraction=offload_fraction,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._masters: list[Tensor] = [self._inner.param_to_inner_param[p] for p in self._trained]
        self._states: list[dict[str, Tensor]] = []
        self.reset()

    @property
    def updates(self) -> int:
        """Updates done."""
        return int(self._states[0]["step"]) if self._states else 0

    @updates.setter
    def updates(self, value: int) -> None:
        for state in self._states:
            state["step"].fill_(value)

    @property
    def offloaded_entries(self) -> int:
        """Entries of factors whose state is on the host."""
        return sum(m.numel() for m in self._masters if not m.is_cuda)

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        """See `AdapterOptimizer`."""
        for group in self._inner.param_groups:
            group["lr"] = lr
        # The hybrid optimizer reads `decoupled_grad` of factors whose master it made, and `.grad` of fp32 ones.
        for trained, gradient in zip(self._trained, gradients, strict=True):
            setattr(trained, _gradient_name(trained), gradient)
        self._inner.step()
        for slot, trained, copy in zip(self.slots, self._trained, self._copies, strict=True):
            setattr(trained, _gradient_name(trained), None)
            if copy is not None:
                slot.tensor.copy_(copy)

    def state_slots(self) -> list[Slot]:
        """See `AdapterOptimizer`; the names are those of `AdamW`, so either reads the other's save."""
        named = []
        for slot, master, state in zip(self.slots, self._masters, self._states, strict=True):
            kinds = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if slot.tensor.dtype != torch.float32:
                kinds["master"] = master
            named += [replace(slot, name=f"{slot.name}.{kind}", tensor=tensor) for kind, tensor in kinds.items()]
        return named

    @torch.no_grad()
    def reset(self) -> None:
        """See `AdapterOptimizer`. Also makes the state that torch would make at the first step."""
        for slot, trained, master in zip(self.slots, self._trained, self._masters, strict=True):
            trained.copy_(slot.tensor)
            master.copy_(slot.tensor)
        self._states = []
        owner = {id(p): o for o in self._inner.sub_optimizers for group in o.param_groups for p in group["params"]}
        for master in self._masters:
            state = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
            owner[id(master)].state[master] = state
            self._states.append(state)


def _gradient_name(trained: Tensor) -> str:
    return "grad" if trained.dtype == torch.float32 else "decoupled_grad"


def _fp32_copy(factor: Tensor) -> Tensor | None:
    return None if factor.dtype == torch.float32 else factor.detach().float()
