"""The source and target directories of a conversion, and the checks that must hold before hours of work begin."""

import json
import shutil
from pathlib import Path
from typing import Any

from k31core.checkpoint.native import INDEX, NativeCheckpoint

PACKED, SCALE, WEIGHT = ".weight_packed", ".weight_scale", ".weight"
RECORDS = ".converted"
"""Inside the target of a running conversion: one JSON record for each finished shard; removed at the end."""
MANIFEST = "k31_conversion.json"
"""Inside a finished BF16 conversion: what it was made from, with digests."""
_CARRIED = {".json", ".jinja", ".model", ".txt", ".tiktoken", ".md"}
"""Files beside the weights that a checkpoint needs. Python files are never carried."""


class ConvertError(ValueError):
    """A conversion that must not start or cannot go on: names the directory or tensor and the next step."""


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConvertError(f"{directory} is not a directory: give the one that holds the checkpoint's config.json")
    if (directory / RECORDS).is_dir():
        raise ConvertError(
            f"{directory} is half-converted: run `k31 convert mxfp4-to-bf16` on its source again, it continues"
        )
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
    declared: dict[str, Any] | None = config.get("quantization_config") or config["text_config"].get(
        "quantization_config"
    )
    return declared


def open_mxfp4(directory: Path) -> tuple[dict[str, Any], NativeCheckpoint]:
    """(config, index) of an MXFP4 checkpoint; refuses a BF16 one and a half-converted directory by name."""
    config, checkpoint, packed, declared = _open(directory)
    if declared is None and not packed:
        raise ConvertError(f"{directory} is a BF16 checkpoint (no quantization_config), an MXFP4 one is needed here")
    if declared is None or not packed or declared.get("format") != "mxfp4-pack-quantized":
        raise ConvertError(
            f"{directory}: quantization_config says {declared and declared.get('format')!r}, packed tensors are "
            f"{'present' if packed else 'absent'}; expected format 'mxfp4-pack-quantized' with packed tensors"
        )
    return config, checkpoint


def open_bf16(directory: Path) -> tuple[dict[str, Any], NativeCheckpoint]:
    """(config, index) of a BF16 checkpoint; refuses an MXFP4 one and a half-converted directory by name."""
    config, checkpoint, packed, declared = _open(directory)
    if declared is not None or packed:
        raise ConvertError(
            f"{directory} is an MXFP4 checkpoint (quantization_config or packed tensors), a BF16 one is needed here: "
            "convert it first with `k31 convert mxfp4-to-bf16`"
        )
    return config, checkpoint


def _open(directory: Path) -> tuple[dict[str, Any], NativeCheckpoint, bool, dict[str, Any] | None]:
    config = read_config(directory)
    if not (directory / INDEX).is_file():
        raise ConvertError(
            f"{directory / INDEX} is missing: {directory} is half-converted or half-downloaded; finish that first"
        )
    checkpoint = NativeCheckpoint(directory)
    packed = any(name.endswith(PACKED) for name in checkpoint.shard_of)
    return config, checkpoint, packed, quantization(config)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a finished BF16 conversion; None for a BF16 checkpoint that was not made here."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path} is not JSON ({error}): convert again into another directory") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), list):
        raise ConvertError(f"{path} lists no files: convert again into another directory")
    return manifest


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that is, contains or lies inside the source, or is no directory."""
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ConvertError(f"the target {target} and the source {source} contain one another: choose another target")
    if target.exists() and not target.is_dir():
        raise ConvertError(f"the target {target} is a file: give a directory")


def make_target(target: Path) -> None:
    """Create the target directory. Raises ConvertError when the file system does not allow it."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvertError(f"cannot make the target directory {target}: {error.strerror}") from error


def carry_files(source: Path, target: Path) -> None:
    """Copy the tokenizer and the other small files; config, index and weights are written by the conversion."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _CARRIED and path.name not in ("config.json", INDEX, MANIFEST):
            shutil.copyfile(path, target / path.name)


def check_free_space(directory: Path, needed: int) -> None:
    """Refuse to start when the disk cannot take `needed` bytes. `directory` may not be there yet."""
    present = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(present).free
    if free < needed:
        raise ConvertError(
            f"{directory}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; "
            "free some or choose another disk"
        )
