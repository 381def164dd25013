"""A checkpoint of a few layers, cut from a full one: for smoke tests at real widths.

Only the tensors that stay are read. Layers are numbered anew, and so are the layer lists of the configuration.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from k31core.checkpoint.native import INDEX, NativeCheckpoint, write_native_checkpoint
from k31core.checkpoint.tensor_file import TensorFile
from k31core.convert.source import (
    ConvertError,
    carry_files,
    check_free_space,
    check_target,
    make_target,
    open_mxfp4,
)
from k31core.model.config import load_config
from k31core.model.weight_names import IGNORED_PREFIXES, expected_names

_LAYER = re.compile(r"^(language_model\.model\.layers\.)(\d+)(\..+)$")


def prune(model_dir: Path, save_dir: Path, keep: list[int], *, shard_bytes: int = 4 << 30) -> dict[str, Any]:
    """Write the layers `keep` (1-based, rising) of `model_dir` as a whole checkpoint; returns what was written.

    Raises ConvertError for a source that is no native checkpoint, and when the kept layers do not make a model:
    unknown numbers, or no layer of one attention kind. ConfigError or CheckpointError for a damaged source.
    """
    check_target(model_dir, save_dir)
    if (save_dir / INDEX).exists():
        raise ConvertError(f"{save_dir} already holds a checkpoint: choose another directory")
    source, checkpoint = open_mxfp4(model_dir)
    full = load_config(model_dir)
    config = pruned_config(source, keep)
    checkpoint.check_names(expected_names(full), IGNORED_PREFIXES)
    renamed = dict(_renamed(checkpoint, keep))
    check_free_space(save_dir, _bytes_of(checkpoint, renamed))
    make_target(save_dir)
    for left in save_dir.glob("*.partial"):
        left.unlink()
    carry_files(model_dir, save_dir)
    write_native_checkpoint(save_dir, config, _tensors(checkpoint, renamed), shard_bytes)
    return {"layers": len(keep), "tensors": len(renamed), "directory": str(save_dir)}


def pruned_config(config: dict[str, Any], keep: list[int]) -> dict[str, Any]:
    """`config` for the layers `keep` (1-based, rising): counts and layer lists numbered anew."""
    text = config["text_config"]
    layers = text["num_hidden_layers"]
    if not keep or keep != sorted(set(keep)) or keep[0] < 1 or keep[-1] > layers:
        shown = keep if len(keep) < 10 else f"{str(keep[:3])[:-1]}, … {keep[-1]}]"
        raise ConvertError(f"layers to keep must be rising numbers from 1 to {layers}, got {shown}")
    dense = sum(number <= text["first_k_dense_replace"] for number in keep)
    number_of = {old: new for new, old in enumerate(keep, start=1)}
    result = copy.deepcopy(config)
    new = result["text_config"]
    new["num_hidden_layers"] = len(keep)
    new["first_k_dense_replace"] = dense
    lists = [(new["linear_attn_config"], "kda_layers"), (new["linear_attn_config"], "full_attn_layers")]
    if "dsa_config" in new:
        lists.append((new["dsa_config"], "dsa_layers"))
    for owner, field in lists:
        owner[field] = [number_of[old] for old in owner[field] if old in number_of]
        if not owner[field]:
            raise ConvertError(f"no layer of {field} is kept ({keep}): keep at least one of each attention kind")
    if dense == len(keep):
        raise ConvertError(f"only dense layers are kept ({keep}): keep at least one layer with experts")
    return result


def _renamed(checkpoint: NativeCheckpoint, keep: list[int]) -> Iterator[tuple[str, str]]:
    """(old name, new name) of every tensor that stays, in the order of the new names."""
    number_of = {old - 1: new for new, old in enumerate(keep)}
    pairs = []
    for name in checkpoint.shard_of:
        match = _LAYER.match(name)
        if match is None:
            pairs.append((name, name))
        elif int(match[2]) in number_of:
            pairs.append((name, f"{match[1]}{number_of[int(match[2])]}{match[3]}"))
    return iter(sorted(pairs, key=lambda pair: pair[1]))


def _bytes_of(checkpoint: NativeCheckpoint, renamed: dict[str, str]) -> int:
    total = 0
    for shard in {checkpoint.shard_of[name] for name in renamed}:
        with TensorFile(checkpoint.directory / shard) as file:
            total += sum(entry.nbytes for name, entry in file.entries.items() if name in renamed)
    return total


def _tensors(checkpoint: NativeCheckpoint, renamed: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    opened: dict[str, TensorFile] = {}
    try:
        for old, new in renamed.items():
            shard = checkpoint.shard_of[old]
            if shard not in opened:
                opened[shard] = TensorFile(checkpoint.directory / shard)
            if old not in opened[shard].entries:
                raise ConvertError(f"{opened[shard].path}: the index says {old} is here, the file has no such tensor")
            yield new, opened[shard].read(old)
    finally:
        for file in opened.values():
            file.close()
