"""Handles opened as SGLang opens them: by an unpickler that admits SGLang's and torch's names and nothing else."""

import base64
import hashlib
import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

ADMITTED = ("torch", "torch.multiprocessing.reductions", "torch.storage", "torch._utils", "collections", "builtins")
METADATA = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")


class Metadata(NamedTuple):
    """The fields of SGLang's class, in its order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == METADATA:
            return Metadata
        if module not in ADMITTED:
            raise ValueError(f"{module}.{name} is not admitted in a payload")
        return super().find_class(module, name)


def open_payload(text: str) -> dict[str, Tensor]:
    """The tensors of a flattened bucket, as views of the sender's memory."""
    tree = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    flat = tree["flattened_tensor"]
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in tree["metadata"]}


def differing(tensors: dict[str, Tensor], expected: dict[str, str]) -> list[str]:
    """Names whose SHA-256 is another, or that are on one side only."""
    seen = {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    return sorted(name for name in seen.keys() | expected.keys() if seen.get(name) != expected.get(name))
