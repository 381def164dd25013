"""Optimizer state by logical tensor: every rank writes the slices it owns, any layout reads what it needs.

<adapter directory>/optimizer/
  state-00001-of-00004.safetensors   the slices one rank wrote, named `<logical adapter tensor>.exp_avg` and so on
  state-00001-of-00004.json          which part of its logical tensor each slice is; number of updates done

294 GB at full size, so it is optional: a resume without it starts the moments from zero and says so.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31core.checkpoint.tensor_file import NAMES, TensorFile, write_tensor_file
from k31core.parallel.sharding import Slot

OPTIMIZER_DIR = "optimizer"
_FORMAT = 1


class OptimizerStateError(ValueError):
    """Saved optimizer state that is incomplete or belongs to another adapter: names the file and the tensor."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a logical tensor in one file."""

    file: Path
    shape: tuple[int, ...]
    dim: int | None
    start: int
    length: int


def write_optimizer_state(
    directory: Path, slots: Iterable[Slot], *, updates: int, writer: int = 0, writers: int = 1
) -> list[Path]:
    """Write this rank's slices into `directory` (made if missing); returns the files.

    `slots` are the ones this rank owns: of ranks that hold the same slice, the caller lets one write it. Refuses a
    non-finite value by name. Slots are written in name order, so equal state gives equal bytes.
    """
    ordered = sorted(slots, key=lambda slot: slot.name)
    for slot in ordered:
        if not bool(slot.tensor.isfinite().all()):
            raise OptimizerStateError(f"optimizer state {slot.name} is not finite: nothing was written")
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"state-{writer + 1:05d}-of-{writers:05d}"
    index: dict[str, Any] = {"format": _FORMAT, "updates": updates, "tensors": {}}
    for slot in ordered:
        shard = slot.shard
        index["tensors"][slot.name] = {
            "shape": list(shard.shape),
            "dim": shard.dim,
            "start": shard.start if shard.dim is not None else 0,
            "length": shard.length if shard.dim is not None else 0,
        }
    data, listing = directory / f"{stem}.safetensors", directory / f"{stem}.json"
    write_tensor_file(data, {slot.name: slot.tensor for slot in ordered}, {"format": "pt"})
    listing.write_text(json.dumps(index, indent=1, sort_keys=True))
    return [data, listing]


def has_optimizer_state(directory: Path) -> bool:
    """Whether `directory` holds any optimizer state."""
    return any(directory.glob("state-*-of-*.json"))


def read_optimizer_state(directory: Path, slots: Sequence[Slot]) -> int:
    """Fill the slots from whatever layout wrote them; returns the number of updates done.

    Nothing is changed when anything is wrong. Raises `OptimizerStateError` for a missing writer, a missing tensor, a
    gap in a tensor, or a shape or dtype that differs.
    """
    saved, updates = _read_index(directory)
    parts: list[Tensor] = []
    files: dict[Path, TensorFile] = {}
    try:
        for slot in slots:
            if slot.name not in saved:
                raise OptimizerStateError(f"{directory}: {slot.name} is missing; it was saved for another adapter")
            parts.append(_assemble(slot, saved[slot.name], files))
    finally:
        for file in files.values():
            file.close()
    with torch.no_grad():
        for slot, part in zip(slots, parts, strict=True):
            slot.tensor.copy_(part)
    return updates


def _read_index(directory: Path) -> tuple[dict[str, list[_Slice]], int]:
    listings = sorted(directory.glob("state-*-of-*.json"))
    if not listings:
        raise OptimizerStateError(f"{directory}: no optimizer state")
    writers = int(listings[0].stem.rsplit("-", 1)[1])
    if len(listings) != writers:
        raise OptimizerStateError(f"{directory}: {len(listings)} of {writers} writers' files are there")
    saved: dict[str, list[_Slice]] = {}
    counts = set()
    for path in listings:
        try:
            raw = json.loads(path.read_text())
            if raw["format"] != _FORMAT:
                raise OptimizerStateError(f"{path}: format {raw['format']}, this version reads {_FORMAT}")
            counts.add(int(raw["updates"]))
            for name, entry in raw["tensors"].items():
                part = _Slice(
                    path.with_suffix(".safetensors"),
                    tuple(entry["shape"]),
                    entry["dim"],
                    entry["start"],
                    entry["length"],
                )
                saved.setdefault(name, []).append(part)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise OptimizerStateError(f"{path}: damaged ({type(error).__name__}: {error})") from error
    if len(counts) != 1:
        raise OptimizerStateError(f"{directory}: writers disagree about the number of updates: {sorted(counts)}")
    return saved, counts.pop()


def _assemble(slot: Slot, slices: list[_Slice], files: dict[Path, TensorFile]) -> Tensor:
    """This slot's part of the logical tensor, from the slices that overlap it; reads no other rows of it."""
    shard = slot.shard
    target = torch.empty(shard.local_shape, dtype=slot.tensor.dtype)
    dim = shard.dim if shard.dim is not None else next((s.dim for s in slices if s.dim is not None), 0)
    wanted = (shard.start, shard.start + shard.length) if shard.dim is not None else (0, shard.shape[dim])
    covered = 0
    for part in slices:
        if part.shape != shard.shape:
            raise OptimizerStateError(
                f"{part.file}: {slot.name} belongs to a tensor of shape {list(part.shape)}, "
                f"this one has {list(shard.shape)}"
            )
        if part.dim is not None and part.dim != dim:
            raise OptimizerStateError(f"{part.file}: {slot.name} was divided along {part.dim}, this layout needs {dim}")
        held = (0, part.shape[dim]) if part.dim is None else (part.start, part.start + part.length)
        low, high = max(held[0], wanted[0]), min(held[1], wanted[1])
        if low >= high:
            continue
        if part.file not in files:
            files[part.file] = TensorFile(part.file)
        file = files[part.file]
        entry = file.entries.get(slot.name)
        if entry is None or entry.dtype != slot.tensor.dtype:
            seen = "missing" if entry is None else NAMES[entry.dtype]
            raise OptimizerStateError(f"{part.file}: {slot.name} is {seen}, expected {NAMES[slot.tensor.dtype]}")
        rows = file.read(slot.name, dim, low - held[0], high - low)
        target.narrow(dim, low - wanted[0], high - low).copy_(rows)
        covered += high - low
    if covered != wanted[1] - wanted[0]:
        raise OptimizerStateError(
            f"{slot.name}: the saved slices cover {covered} of {wanted[1] - wanted[0]} entries along dimension {dim}"
        )
    return target
