"""Handles: a flat buffer and the engine's own description of what is in it, as text that another process opens.

A handle is what torch's own reducers make of a tensor: for CUDA memory an IPC handle, for CPU memory a file name (so
that all of this runs without a card). The engine's classes are written by name: this process need not have the engine
installed, and its unpickler knows exactly these names.
"""

import base64
import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from k31core.ops.digest import Bucket, Slot

_DEVICE = 6
"""Position of the device index in the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A call that the reader makes: `module.name(*arguments)`. The module need not exist here."""

    module: str
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class HandleFormat:
    """What the engine reads."""

    metadata_of: Callable[[Slot], Any]
    """Its description of one tensor in a flat buffer; a `Foreign` where it is a class of the engine."""
    cuda_rebuild: tuple[str, str] | None = None
    """(module, name) of its function that opens CUDA memory with the card named by UUID: trainer and engine number the
    cards differently. None: torch's own, with this process's number."""


class _HandlePickler(pickle._Pickler):
    """Pure Python, so that `save` can be extended; a handle has a few thousand small objects."""

    def __init__(self, out: io.BytesIO, cuda_rebuild: tuple[str, str] | None) -> None:
        super().__init__(out, protocol=4)
        registered: dict[type, Callable[[Any], Any]] = getattr(ForkingPickler, "_extra_reducers")  # noqa: B009
        self.dispatch_table = copyreg.dispatch_table | registered
        self._cuda_rebuild = cuda_rebuild

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        write: Callable[[bytes], None] = getattr(self, "write")  # noqa: B009  (the stubs do not know it)
        plain: Callable[..., None] = getattr(super(), "save")  # noqa: B009
        if isinstance(obj, Tensor) and obj.is_cuda and self._cuda_rebuild is not None:
            obj = by_uuid(obj, self._cuda_rebuild)
        if isinstance(obj, Foreign):
            write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            plain(obj.arguments)
            write(pickle.REDUCE)
            return
        plain(obj, save_persistent_id)


def by_uuid(tensor: Tensor, rebuild: tuple[str, str]) -> Foreign:
    """A CUDA tensor's handle with the card's UUID in place of its number."""
    _, arguments = reductions.reduce_tensor(tensor)
    changed = list(arguments)
    changed[_DEVICE] = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return Foreign(*rebuild, tuple(changed))


def share_by_name() -> None:
    """CPU memory is shared by file name in this process: a descriptor could be opened by our own children only."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def serialise(bucket: Bucket, form: HandleFormat) -> str:
    """The handle of a flat buffer, as base64 text. The buffer must live until the reader is done."""
    out = io.BytesIO()
    content = {"flattened_tensor": bucket.data, "metadata": [form.metadata_of(slot) for slot in bucket.slots]}
    _HandlePickler(out, form.cuda_rebuild).dump(content)
    return base64.b64encode(out.getvalue()).decode("ascii")
