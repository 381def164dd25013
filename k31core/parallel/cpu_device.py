"""Lets megatron-core 0.19.2 run on CPU tensors: an explicit context, entered by whoever trains, inert when CUDA exists.

megatron-core spells its device as `torch.cuda.current_device()`, `"cuda"` literals and CUDA streams even where nothing
else needs a GPU; the collectives themselves work on gloo. Inside the context those spellings mean the CPU, in this
thread for the literals and in this process for the rest; on leaving everything is as before.

Needed for: tensor_parallel.mappings, pipeline_parallel.schedules and p2p_communication. To be removed when
megatron-core takes the device of its arguments (`tests/unit/parallel/test_cpu_device.py` says when that happens).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces `device="cuda"` arguments by the CPU in factory functions and `.to`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **(kwargs or {}))


@contextmanager
def cpu_device() -> Iterator[None]:
    """Context in which megatron-core's CUDA spellings mean the CPU; does nothing when a CUDA device exists."""
    if torch.cuda.is_available():
        yield
        return
    replaced: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *_: None,
    }
    before = {name: getattr(torch.cuda, name) for name in replaced}
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
