"""The base weights in the native layout: `model.safetensors.index.json`, shards, MXFP4 experts, padded `A_log`.

A rank reads only the bytes of its slots, in the order they lie in the files. The caller passes the slots (and, through
`check_names`, the whole set of names), so this module knows no model.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31core.checkpoint.stream import Piece, extents, stream
from k31core.checkpoint.tensor_file import NAMES, TensorFile, write_tensor_file
from k31core.ops.mxfp4 import check_scale
from k31core.parallel.sharding import Shard, Slot, Stored

INDEX = "model.safetensors.index.json"
ALLOWED = {
    Stored.WEIGHT: (torch.bfloat16,),
    Stored.SMALL: (torch.bfloat16, torch.float32),
    Stored.EXACT: (torch.float32,),
    Stored.PACKED: (torch.uint8,),
    Stored.SCALE: (torch.uint8,),
    Stored.FACTOR: (torch.bfloat16, torch.float32),
}
"""dtypes that a file may have."""
_PROGRESS_BYTES = 1 << 30
"""A load larger than this shows a progress bar."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as this model: names the file or tensor, what was found and what was
    expected."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load read."""

    tensors: int
    requested: dict[str, list[tuple[int, int]]]
    """(offset, length) of the byte ranges asked of each shard; headers are not counted."""
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes asked for."""
        return sum(length for ranges in self.requested.values() for _, length in ranges)

    @property
    def bytes_per_second(self) -> float:
        """Average rate."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class NativeCheckpoint:
    """A checkpoint directory. Opening reads the index only; shard headers are read when a tensor of the shard is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shard_of = _read_index(directory)

    def check_names(self, expected: set[str], ignored_prefixes: tuple[str, ...]) -> None:
        """Raise `CheckpointError` unless the index has exactly `expected`, beside names with an ignored prefix."""
        present = {name for name in self.shard_of if not name.startswith(ignored_prefixes)}
        missing, unknown = sorted(expected - present), sorted(present - expected)
        if missing:
            raise CheckpointError(
                f"{self.directory / INDEX}: {len(missing)} tensors of this model are missing, first {missing[0]!r}"
            )
        if unknown:
            raise CheckpointError(
                f"{self.directory / INDEX}: {len(unknown)} tensors are unknown to this model, first {unknown[0]!r}"
            )

    def load(self, slots: Iterable[Slot], *, progress: bool = True) -> LoadReport:
        """Fill every slot from the files and check it; raises `CheckpointError` or `TensorFileError` by name."""
        by_shard: dict[str, list[Slot]] = {}
        for slot in slots:
            if slot.name not in self.shard_of:
                raise CheckpointError(f"{self.directory / INDEX}: tensor {slot.name!r} is missing")
            by_shard.setdefault(self.shard_of[slot.name], []).append(slot)
        total = sum(_slot_bytes(slot) for group in by_shard.values() for slot in group)
        begun = time.perf_counter()
        requested: dict[str, list[tuple[int, int]]] = {}
        with _Progress(total if progress and total >= _PROGRESS_BYTES else 0) as bar:
            for shard in sorted(by_shard):
                with TensorFile(self.directory / shard) as file:
                    requested[shard] = _load_shard(file, by_shard[shard], bar.advance)
        seconds = time.perf_counter() - begun
        return LoadReport(sum(len(group) for group in by_shard.values()), requested, seconds)


def write_native_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Iterator[tuple[str, Tensor]], shard_bytes: int = 4 << 30
) -> None:
    """Write `config.json`, shards of at most `shard_bytes` (a larger tensor gets its own) and the index, last.

    Shards are numbered when their count is known; nothing else in the directory is touched.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    parts: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        path = directory / f"model-{len(parts) + 1:05d}.partial"
        write_tensor_file(path, pending, {"format": "pt"})
        parts.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor
        size += nbytes
        total += nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=1))


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; is this a complete checkpoint directory?")
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not an index with a weight_map ({error!r}); download it again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{path}: weight_map names {shard!r}, which is not a file of this directory")
        if not (directory / shard).is_file():
            raise CheckpointError(f"{directory / shard}: shard is missing; download the checkpoint again")
    return weight_map


def _slot_bytes(slot: Slot) -> int:
    return slot.tensor.numel() * slot.tensor.element_size()


def _load_shard(file: TensorFile, slots: list[Slot], advance: Callable[[int], None]) -> list[tuple[int, int]]:
    """Fill the slots of one file: consecutive bytes in one stream, row slices one by one. Returns the ranges read."""
    for slot in slots:
        _check_entry(file, slot.name, slot.shard)
    pieces = []
    for slot in sorted(slots, key=lambda slot: file.entries[slot.name].start):
        shard = slot.shard
        if shard.whole or shard.dim == 0 or shard.zero_padded_to is not None:
            pieces.append(_piece(file, slot, advance))
        else:
            _fill(file, slot, file.read(slot.name, shard.dim, shard.start, shard.length))
            advance(_slot_bytes(slot))
    stream(file.path, pieces)
    return [*file.requested, *extents(pieces)]


def _piece(file: TensorFile, slot: Slot, advance: Callable[[int], None]) -> Piece:
    """Where the slot's bytes lie and go: into its own memory when nothing is left to change, else into a copy."""
    shard, target, entry = slot.shard, slot.tensor, file.entries[slot.name]
    start, shape = entry.start, entry.shape
    if not shard.whole and shard.zero_padded_to is None:
        start += shard.start * (entry.nbytes // entry.shape[0])
        shape = shard.local_shape
    straight = target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous()
    stored = target.detach() if straight and target.shape == shape else torch.empty(shape, dtype=entry.dtype)

    def done() -> None:
        _fill(file, slot, stored)
        advance(_slot_bytes(slot))

    return Piece(start, stored.view(-1).view(torch.uint8), done)


def _check_entry(file: TensorFile, name: str, shard: Shard) -> None:
    entry = file.entries.get(name)
    if entry is None:
        raise CheckpointError(f"{file.path}: the index says {name!r} is here, the file has no such tensor")
    shape = shard.shape if shard.zero_padded_to is None else (shard.zero_padded_to,)
    if entry.shape != shape:
        raise CheckpointError(f"{file.path}: {name} has shape {list(entry.shape)}, this model needs {list(shape)}")
    allowed = ALLOWED[shard.stored]
    if entry.dtype not in allowed:
        expected = " or ".join(NAMES[dtype] for dtype in allowed)
        raise CheckpointError(f"{file.path}: {name} has dtype {NAMES[entry.dtype]}, this model needs {expected}")


@torch.no_grad()
def _fill(file: TensorFile, slot: Slot, stored: Tensor) -> None:
    """Put what was read into the slot, checked. `stored` may be the slot's own memory already."""
    if slot.shard.zero_padded_to is not None:
        stored = slot.shard.take(_strip_padding(file, slot, stored))
    if stored.data_ptr() != slot.tensor.data_ptr():
        slot.tensor.copy_(stored)
    if slot.shard.stored is Stored.SCALE:
        check_scale(slot.tensor, slot.name)


def _strip_padding(file: TensorFile, slot: Slot, stored: Tensor) -> Tensor:
    used = slot.shard.shape[0]
    beyond = stored[used:]
    if bool((beyond != 0).any()):
        where = used + int((beyond != 0).nonzero()[0])
        raise CheckpointError(
            f"{file.path}: {slot.name} has {float(stored[where])} at entry {where}; entries past the {used} heads are "
            "padding and must be zero"
        )
    return stored[:used]


class _Progress:
    """A progress bar with a rate; silent for a total of 0."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._stack = ExitStack()
        self._advance: Any = None

    def __enter__(self) -> "_Progress":
        if self._total:
            from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            bar = Progress(
                *Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
            )
            self._stack.enter_context(bar)
            task = bar.add_task("base weights", total=self._total)
            self._advance = lambda count: bar.advance(task, count)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def advance(self, count: int) -> None:
        if self._advance is not None:
            self._advance(count)
