"""Finite check of a safetensors file without torch: every float of every tensor, straight from the bytes."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

_CHUNK_BYTES = 64 * 1024**2
_INTEGERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class TensorFileError(ValueError):
    """A safetensors file that is damaged or holds a value that is not finite: names file and tensor."""


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors of a safetensors file `{name: {dtype, shape, data_offsets}}` and where their bytes begin.

    Raises TensorFileError for an empty, truncated or malformed file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if len(head) < 8 or length > size - 8:
            raise TensorFileError(f"{path} is not a whole safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise TensorFileError(f"{path} has a damaged header: {error}") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise TensorFileError(f"{path} has {size} bytes, its header asks for {8 + length + end}: truncated or extended")
    return header, 8 + length


def check_finite(path: Path) -> None:
    """Raise TensorFileError when a float tensor of `path` holds NaN or an infinity. Reads the file once, in chunks."""
    header, begin = read_header(path)
    for name, entry in sorted(header.items()):
        first, last = entry["data_offsets"]
        if entry["dtype"] in _INTEGERS or first == last:
            continue
        if entry["dtype"] not in _FLOATS and entry["dtype"] != "BF16":
            raise TensorFileError(
                f"{path}: tensor {name} has dtype {entry['dtype']}, which the finite check cannot read"
            )
        _check_tensor(path, name, entry["dtype"], begin + first, last - first)


def _check_tensor(path: Path, name: str, dtype: str, offset: int, length: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        done = 0
        while done < length:
            chunk = file.read(min(_CHUNK_BYTES, length - done))
            done += len(chunk)
            if not _all_finite(chunk, dtype):
                raise TensorFileError(
                    f"{path}: tensor {name} holds NaN or an infinity; it must not be trained from or served"
                )


def _all_finite(chunk: bytes, dtype: str) -> bool:
    if dtype == "BF16":
        # bfloat16 is the upper half of a float32: an exponent of all ones is NaN or infinity
        return not bool(np.any((np.frombuffer(chunk, dtype="<u2") & 0x7F80) == 0x7F80))
    return bool(np.isfinite(np.frombuffer(chunk, dtype=_FLOATS[dtype])).all())
