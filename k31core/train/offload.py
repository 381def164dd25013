"""The trainer's frozen weights leave the card while the engine works on it, and come back before a step.

They never change, so the host copy is made once and kept; the adapter and what the optimizer keeps on the card stay.
"""

import torch
from torch import Tensor

from k31core.model.decoder import Decoder
from k31core.model.weight_names import adapter_slots


class FrozenOffload:
    """Of one decoder, which must not be used between `offload` and `onload`. On a CPU nothing moves."""

    def __init__(self, decoder: Decoder) -> None:
        """Finds every parameter and buffer that is no adapter factor."""
        self._device = decoder.build.device
        factors = {slot.tensor.data_ptr() for slot in adapter_slots(decoder)}
        everything = [*decoder.parameters(), *decoder.buffers()]
        self._frozen = [tensor for tensor in everything if tensor.data_ptr() not in factors and tensor.numel()]
        self._host: list[Tensor] = []
        self.on_card = True

    @property
    def num_bytes(self) -> int:
        """Size of the frozen weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._frozen)

    @torch.no_grad()
    def offload(self) -> int:
        """Free the card; returns the bytes that left it."""
        if self._device.type == "cpu" or not self.on_card:
            return 0
        if not self._host:
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) for t in self._frozen]
        torch.cuda.synchronize(self._device)
        for tensor, host in zip(self._frozen, self._host, strict=True):
            tensor.data = host
        torch.cuda.empty_cache()  # cached blocks would be of no use to another process
        self.on_card = False
        return self.num_bytes

    @torch.no_grad()
    def onload(self) -> int:
        """Back to the card; returns the bytes."""
        if self.on_card:
            return 0
        for tensor, host in zip(self._frozen, self._host, strict=True):
            tensor.data = host.to(self._device, non_blocking=True)
        torch.cuda.synchronize(self._device)
        self.on_card = True
        return self.num_bytes
