"""Adapter directories: `adapter_config.json` and `adapter_model.safetensors`, logical tensors under checkpoint names.

The names and shapes do not depend on the layout that wrote them, so any layout loads any adapter.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31core.checkpoint.shared_file import lay_out, write_slices
from k31core.checkpoint.tensor_file import NAMES, TensorFile, write_tensor_file
from k31core.parallel.sharding import Slot

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_FACTOR_DTYPES = (torch.float32, torch.bfloat16)


class AdapterError(ValueError):
    """An adapter that does not fit or is damaged: names the file, the tensor or field, and the two values that
    disagree."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What `adapter_config.json` says about the adapter."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None
    """None for `all-linear`."""


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Parse and check `adapter_config.json`; raises `AdapterError` naming the field."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AdapterError(f"{path}: no such file; is this an adapter directory?")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise AdapterError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise AdapterError(f"{path}: expected an object, got {type(raw).__name__}")
    rank, alpha, targets = (_field(raw, name, path) for name in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{path}: field 'r' must be an integer of at least 1, got {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha <= 0:
        raise AdapterError(f"{path}: field 'lora_alpha' must be a positive number, got {alpha!r}")
    if targets != "all-linear" and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
        raise AdapterError(f"{path}: field 'target_modules' must be 'all-linear' or a list of names, got {targets!r}")
    for name, value in (("peft_type", "LORA"), ("experts_shared_outer_loras", True), ("bias", "none")):
        if raw.get(name, value) != value:
            raise AdapterError(f"{path}: field {name!r} is {raw[name]!r}; only {value!r} is implemented")
    if raw.get("lora_dropout", 0.0) != 0:
        raise AdapterError(f"{path}: field 'lora_dropout' is {raw['lora_dropout']!r}; only 0.0 is implemented")
    return AdapterConfig(rank, float(alpha), None if targets == "all-linear" else tuple(targets))


def adapter_config_json(config: AdapterConfig) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "target_modules": "all-linear" if config.targets is None else list(config.targets),
        "experts_shared_outer_loras": True,
    }


def load_adapter(directory: Path, slots: Iterable[Slot], *, partial: bool = False) -> None:
    """Fill the slots with this rank's parts; reads no other bytes.

    Every name in the file must have a slot and the reverse; with `partial` (a pipeline stage holds only its own
    layers) the file may have more. Two slots of one tensor (a tied A) must read equal values. Nothing is changed when
    anything is wrong.
    """
    path = directory / WEIGHTS_FILE
    slots = list(slots)
    with TensorFile(path) as file:
        _check_entries(file, slots, partial)
        parts = [(slot, _read(file, slot)) for slot in slots]
    first: dict[int, tuple[str, Tensor]] = {}
    for slot, part in parts:
        tied_name, tied = first.setdefault(id(slot.tensor), (slot.name, part))
        if not torch.equal(tied, part):
            raise AdapterError(
                f"{path}: this run ties {tied_name} and {slot.name}, the file has different values for them"
            )
    with torch.no_grad():
        for slot, part in parts:
            slot.tensor.copy_(part)


def write_adapter(directory: Path, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write full logical tensors and the configuration; refuses non-finite values by name. The caller commits the
    directory."""
    for name, tensor in tensors.items():
        _check_finite(f"adapter to be written to {directory}", name, tensor)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensor_file(directory / WEIGHTS_FILE, {name: tensors[name] for name in sorted(tensors)}, {"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(adapter_config_json(config), indent=1))


def write_adapter_together(
    directory: Path,
    config: AdapterConfig,
    shapes: Mapping[str, tuple[int, ...]],
    slots: Sequence[Slot],
    *,
    dtype: torch.dtype,
    first: bool,
    agree: Callable[[str | None], str | None],
) -> None:
    """Write one adapter from many ranks, each the parts in `slots` (those it owns); the caller commits the directory.

    A collective: every rank calls it on a directory all of them see. `shapes`: every logical tensor. first: true on one
    rank, which lays the files out. agree: waits for every rank and returns the first complaint of any of them; with
    one, every rank raises (its own error, or `AdapterError`), and what is in the directory must not be committed.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def step(work: Callable[[], None]) -> None:
        own: AdapterError | OSError | None = None
        try:
            work()
        except (AdapterError, OSError) as error:
            own = error
        seen = agree(None if own is None else str(own))
        if own is not None:  # as it is: the caller may want the number of a full disk
            raise own
        if seen is not None:
            raise AdapterError(seen)

    def check() -> None:
        for slot in slots:
            _check_finite(f"adapter to be written to {directory}", slot.name, slot.tensor)
        if first:
            lay_out(directory / WEIGHTS_FILE, shapes, dtype)
            (directory / CONFIG_FILE).write_text(json.dumps(adapter_config_json(config), indent=1))

    step(check)
    step(lambda: write_slices(directory / WEIGHTS_FILE, slots))


def _field(raw: dict[str, Any], name: str, path: Path) -> Any:
    if name not in raw:
        raise AdapterError(f"{path}: field {name!r} is missing")
    return raw[name]


def _check_entries(file: TensorFile, slots: list[Slot], partial: bool) -> None:
    wanted = {slot.name for slot in slots}
    missing, unknown = sorted(wanted - set(file.entries)), sorted(set(file.entries) - wanted)
    if missing:
        raise AdapterError(f"{file.path}: {len(missing)} adapter tensors are missing, first {missing[0]!r}")
    if unknown and not partial:
        raise AdapterError(
            f"{file.path}: {len(unknown)} tensors are no adapter target of this model, first {unknown[0]!r}"
        )
    for slot in slots:
        entry = file.entries[slot.name]
        if entry.shape != slot.shard.shape:
            raise AdapterError(
                f"{file.path}: {slot.name} has shape {list(entry.shape)}, "
                f"this model and rank need {list(slot.shard.shape)}"
            )
        if entry.dtype not in _FACTOR_DTYPES:
            raise AdapterError(f"{file.path}: {slot.name} has dtype {NAMES[entry.dtype]}, expected F32 or BF16")


def _read(file: TensorFile, slot: Slot) -> Tensor:
    part = file.read(slot.name, slot.shard.dim, slot.shard.start, slot.shard.length)
    _check_finite(str(file.path), slot.name, part)
    return part


def _check_finite(where: str, name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        bad = tuple((~tensor.isfinite()).nonzero()[0].tolist())
        raise AdapterError(f"{where}: {name} has {float(tensor[bad])} at index {bad}; the adapter is damaged")
