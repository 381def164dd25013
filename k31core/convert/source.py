"""The source directory of a conversion, and the checks that must hold before hours of work begin."""

import json
import shutil
from pathlib import Path
from typing import Any

from k31core.checkpoint.native import INDEX, NativeCheckpoint

PACKED, SCALE, WEIGHT = ".weight_packed", ".weight_scale", ".weight"
_CARRIED = {".json", ".jinja", ".model", ".txt", ".tiktoken", ".md"}
"""Files beside the weights that a checkpoint needs. Python files are never carried."""


class ConvertError(ValueError):
    """A conversion that must not start or cannot go on: names the directory or tensor and the next step."""


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConvertError(f"{path} is missing: {directory} is not a checkpoint directory") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config"), dict):
        raise ConvertError(f"{path} has no text_config: not a Kimi-K3 or K3.1 checkpoint")
    return config


def quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config, wherever the file has it (top level or text_config); None for a BF16 checkpoint."""
    return config.get("quantization_config") or config["text_config"].get("quantization_config")


def open_mxfp4(directory: Path) -> tuple[dict[str, Any], NativeCheckpoint]:
    """(config, index) of an MXFP4 checkpoint; refuses a BF16 one and a half-converted directory by name."""
    config = read_config(directory)
    if not (directory / INDEX).is_file():
        raise ConvertError(
            f"{directory / INDEX} is missing: {directory} is half-converted or half-downloaded; finish that first"
        )
    checkpoint = NativeCheckpoint(directory)
    packed = any(name.endswith(PACKED) for name in checkpoint.shard_of)
    declared = quantization(config)
    if declared is None and not packed:
        raise ConvertError(f"{directory} is a BF16 checkpoint (no quantization_config), an MXFP4 one is needed here")
    if declared is None or not packed or declared.get("format") != "mxfp4-pack-quantized":
        raise ConvertError(
            f"{directory}: quantization_config says {declared and declared.get('format')!r}, packed tensors are "
            f"{'present' if packed else 'absent'}; expected format 'mxfp4-pack-quantized' with packed tensors"
        )
    return config, checkpoint


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that is, contains or lies inside the source."""
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ConvertError(f"the target {target} and the source {source} contain one another: choose another target")


def carry_files(source: Path, target: Path) -> None:
    """Copy the tokenizer and the other small files; config, index and weights are written by the conversion."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _CARRIED and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, target / path.name)


def check_free_space(directory: Path, needed: int) -> None:
    """Refuse to start when the disk cannot take `needed` bytes."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConvertError(
            f"{directory}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; "
            "free some or choose another disk"
        )
