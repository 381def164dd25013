"""What an exact resume needs beside the adapter: step, learning-rate schedule, random state, optimizer moments.

<adapter directory>/
  adapter_config.json, adapter_model.safetensors     the adapter (k31core.checkpoint.adapter)
  optimizer/                                          optional (k31core.checkpoint.optimizer_state)
  trainer_state.json                                  step, schedule, random state
"""

import base64
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

STATE_FILE = "trainer_state.json"
_FORMAT = 1


class TrainerStateError(ValueError):
    """A trainer state that cannot be resumed from: names the file, the field and the two values."""


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """Constant learning rate after a linear warm-up."""

    lr: float
    warmup_steps: int

    def at(self, step: int) -> float:
        """Learning rate of the update after `step` finished updates."""
        return self.lr if step >= self.warmup_steps else self.lr * (step + 1) / self.warmup_steps


@dataclass(frozen=True, slots=True)
class SavedState:
    """The content of `trainer_state.json`."""

    step: int
    """Optimizer steps done."""
    schedule: LrSchedule
    rng: bytes
    """State of torch's CPU generator."""


def write_trainer_state(directory: Path, state: SavedState) -> Path:
    """Write `trainer_state.json`; equal state gives equal bytes."""
    content = {
        "format": _FORMAT,
        "step": state.step,
        "schedule": asdict(state.schedule),
        "torch_rng": base64.b64encode(state.rng).decode(),
    }
    path = directory / STATE_FILE
    path.write_text(json.dumps(content, indent=1, sort_keys=True))
    return path


def read_trainer_state(directory: Path) -> SavedState | None:
    """The saved state, or None when the directory has none (an adapter from elsewhere)."""
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw["format"] != _FORMAT:
            raise TrainerStateError(f"{path}: format {raw['format']}, this version reads {_FORMAT}")
        return SavedState(int(raw["step"]), LrSchedule(**raw["schedule"]), base64.b64decode(raw["torch_rng"]))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, TrainerStateError):
            raise
        raise TrainerStateError(f"{path}: damaged ({type(error).__name__}: {error})") from error


def rng_state() -> bytes:
    """State of torch's CPU generator."""
    return bytes(torch.get_rng_state().numpy().tobytes())


def set_rng_state(state: bytes) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
