"""One digest over the logical tensors of an adapter, equal for equal values wherever they lie. Torch-free.

SHA-256 over, for each tensor in the order of its name: name, dtype, shape and little-endian bytes. The order of
tensors in a file and its metadata do not matter, so trainer, file and engine can be compared.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from k31core.checkpoint.finite import read_header

_CHUNK_BYTES = 16 << 20


class LogicalDigest:
    """Feed tensors in the order of their names, then read `hexdigest`."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._last = ""

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[bytes | memoryview], None]:
        """Start a tensor; returns the function that takes its bytes. `dtype` as safetensors names it: F32, BF16."""
        if name <= self._last:
            raise ValueError(
                f"tensor {name!r} was digested after {self._last!r}: feed them in the order of their names"
            )
        self._last = name
        self._hash.update(f"{name}\t{dtype}\t{','.join(map(str, shape))}\n".encode())
        return self._hash.update

    def hexdigest(self) -> str:
        """64 hex digits."""
        return self._hash.hexdigest()


def digest_of_file(path: Path) -> str:
    """The digest of every tensor in a safetensors file. Raises TensorFileError for a damaged file."""
    header, begin = read_header(path)
    digest = LogicalDigest()
    with path.open("rb") as file:
        for name in sorted(header):
            entry = header[name]
            first, last = entry["data_offsets"]
            take = digest.begin(name, entry["dtype"], tuple(entry["shape"]))
            file.seek(begin + first)
            left = last - first
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                take(chunk)
                left -= len(chunk)
    return digest.hexdigest()
