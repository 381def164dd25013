"""MXFP4 checkpoint to BF16 checkpoint: exact, streamed shard by shard, resumable, and proved by the inverse.

Every shard becomes a shard of the same name; a packed weight and its scale become one BF16 weight, everything else
(vision tensors too) is carried byte for byte. The index is written last: without it no reader takes the directory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from k31core.checkpoint.fingerprint import checkpoint_fingerprint
from k31core.checkpoint.native import INDEX, NativeCheckpoint
from k31core.checkpoint.tensor_file import Entry, TensorFile
from k31core.checkpoint.tensor_writer import TensorFileWriter
from k31core.convert.shard_pool import default_workers, over_shards
from k31core.convert.source import (
    MANIFEST,
    PACKED,
    RECORDS,
    SCALE,
    WEIGHT,
    ConvertError,
    carry_files,
    check_free_space,
    check_target,
    make_target,
    open_mxfp4,
    read_manifest,
)
from k31core.convert.target_lock import TargetLock
from k31core.ops.mxfp4 import MxFp4Error, decode

PIECE = 64 << 20
"""Bytes of a carried tensor copied at a time."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard."""

    shard: str
    source_size: int
    source_header: str
    """SHA-256 of the source's header: another file of the same name is noticed."""
    size: int
    sha256: str
    experts: int
    """Weights that were decoded."""


def convert_to_bf16(
    model_dir: Path, save_dir: Path, *, workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Convert `model_dir` to BF16 in `save_dir`; returns the manifest, also written as `k31_conversion.json`.

    Finished shards of an interrupted conversion are kept, a finished conversion is returned as it is. `workers`:
    processes, one shard each (default: all cores). `progress(done, total)` is called in bytes written.
    Raises ConvertError, CheckpointError, TensorFileError or MxFp4Error, by file and tensor.
    """
    check_target(model_dir, save_dir)
    config, checkpoint = open_mxfp4(model_dir)
    source = checkpoint_fingerprint(model_dir)
    finished = _finished_before(save_dir, source)
    if finished is not None:
        return finished
    make_target(save_dir / RECORDS)
    with TargetLock(save_dir / RECORDS / "lock"):
        _remove_partial(save_dir)
        records = _convert_shards(model_dir, save_dir, checkpoint, workers, progress or _unseen)
        return _complete(model_dir, save_dir, config, checkpoint, source, records)


def _unseen(done: int, total: int) -> None:
    """Nobody looks at the progress."""


def _convert_shards(
    model_dir: Path,
    save_dir: Path,
    checkpoint: NativeCheckpoint,
    workers: int | None,
    progress: Callable[[int, int], None],
) -> list[ShardRecord]:
    """The records of all shards in the order of their names, after converting those that are not finished."""
    sizes = {shard: _output_bytes(model_dir / shard) for shard in sorted(set(checkpoint.shard_of.values()))}
    done = {shard: record for shard in sizes if (record := _finished(model_dir, save_dir, shard)) is not None}
    todo = [shard for shard in sizes if shard not in done]
    check_free_space(save_dir, sum(sizes[shard] for shard in todo))
    total = sum(sizes.values())

    def show(under_way: int = 0) -> None:
        progress(min(sum(sizes[shard] for shard in done) + under_way, total), total)

    show()
    work = partial(convert_shard, model_dir, save_dir, elsewhere=scales_elsewhere(checkpoint))
    count = workers or default_workers(sum(sizes[shard] for shard in todo))
    for record in over_shards(work, todo, count, lambda: show(_partial_bytes(save_dir))):
        done[record.shard] = record
        show()
    return [done[shard] for shard in sizes]


def _remove_partial(save_dir: Path) -> None:
    for left in save_dir.glob("*.partial"):
        left.unlink(missing_ok=True)


def _partial_bytes(save_dir: Path) -> int:
    total = 0
    for path in save_dir.glob("*.partial"):
        with suppress(FileNotFoundError):  # finished meanwhile
            total += path.stat().st_size
    return total


def scales_elsewhere(checkpoint: NativeCheckpoint) -> dict[str, str]:
    """Shard of every scale that does not lie beside its packed weight. Raises ConvertError for one without a scale."""
    elsewhere = {}
    for name, shard in checkpoint.shard_of.items():
        if name.endswith(PACKED):
            scale = name.removesuffix(PACKED) + SCALE
            owner = checkpoint.shard_of.get(scale)
            if owner is None:
                raise ConvertError(f"{checkpoint.directory / INDEX}: {name} has no scale tensor {scale}")
            if owner != shard:
                elsewhere[scale] = owner
    return elsewhere


def convert_shard(model_dir: Path, save_dir: Path, shard: str, *, elsewhere: Mapping[str, str]) -> ShardRecord:
    """Convert one shard; at most one decoded weight and one piece are in memory."""
    # A process that outlives its conversion must not write into the file of the next one: the name has our id.
    partial_file, final = save_dir / f"{shard}.{os.getpid()}.partial", save_dir / shard
    source = model_dir / shard
    scales: dict[str, TensorFile] = {}
    experts = 0
    try:
        with TensorFile(source) as file, TensorFileWriter(partial_file, _layout(file)) as writer:
            for name, _ in _in_file_order(file):
                if name.endswith(PACKED):
                    scale = read_scale(file, name, elsewhere, scales)
                    writer.write(name.removesuffix(PACKED) + WEIGHT, _decoded(file, name, scale))
                    experts += 1
                elif not name.endswith(SCALE):
                    for piece in pieces(file, name):
                        writer.write(name, piece)
            written = writer.finish()
    except OSError as error:
        partial_file.unlink(missing_ok=True)
        raise ConvertError(f"{final}: {error.strerror}; finished shards are kept: mend it, run again") from error
    finally:
        for opened in scales.values():
            opened.close()
    os.replace(partial_file, final)
    record = ShardRecord(shard, source.stat().st_size, _header_digest(source), written.size, written.sha256, experts)
    _write_json(save_dir / RECORDS / f"{shard}.json", asdict(record))
    return record


def _layout(file: TensorFile) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, entry in _in_file_order(file):
        if name.endswith(PACKED):
            shape = (*entry.shape[:-1], entry.shape[-1] * 2)
            layout[name.removesuffix(PACKED) + WEIGHT] = (torch.bfloat16, shape)
        elif not name.endswith(SCALE):
            layout[name] = (entry.dtype, entry.shape)
    return layout


def _in_file_order(file: TensorFile) -> list[tuple[str, Entry]]:
    return sorted(file.entries.items(), key=lambda item: (item[1].start, item[0]))


def _decoded(file: TensorFile, name: str, scale: torch.Tensor) -> torch.Tensor:
    try:
        return decode(file.read(name), scale, torch.bfloat16)
    except MxFp4Error as error:
        raise ConvertError(f"{file.path}: {name}: {error}") from error


def read_scale(
    file: TensorFile, packed_name: str, elsewhere: Mapping[str, str], opened: dict[str, TensorFile]
) -> torch.Tensor:
    """The scale tensor of a packed one; `opened` keeps other shards open when it is in one of them."""
    name = packed_name.removesuffix(PACKED) + SCALE
    shard = elsewhere.get(name)
    owner = file
    if shard is not None:
        if shard not in opened:
            opened[shard] = TensorFile(file.path.with_name(shard))
        owner = opened[shard]
    if name not in owner.entries:
        raise ConvertError(f"{owner.path}: the index says {name} is here, the file has no such tensor")
    return owner.read(name)


def pieces(file: TensorFile, name: str) -> Iterator[torch.Tensor]:
    """A tensor in pieces of whole rows, about `PIECE` bytes each."""
    entry = file.entries[name]
    if entry.nbytes <= PIECE or not entry.shape:
        yield file.read(name)
        return
    rows = max(1, PIECE // (entry.nbytes // entry.shape[0]))
    for start in range(0, entry.shape[0], rows):
        yield file.read(name, 0, start, min(rows, entry.shape[0] - start))


def _output_bytes(path: Path) -> int:
    with TensorFile(path) as file:
        return sum(
            entry.nbytes * (4 if name.endswith(PACKED) else 1)
            for name, entry in file.entries.items()
            if not name.endswith(SCALE)
        )


def _finished_before(save_dir: Path, source: str) -> dict[str, Any] | None:
    """The manifest of a whole conversion of this source. Raises ConvertError for a directory that holds another
    checkpoint."""
    if not (save_dir / INDEX).is_file() and not (save_dir / "config.json").is_file():
        return None
    if (save_dir / RECORDS).is_dir():
        return None  # stopped while the last files were written
    manifest = read_manifest(save_dir)
    if manifest is not None and manifest.get("source") == source:
        missing = [f["path"] for f in manifest["files"] if not (save_dir / f["path"]).is_file()]
        if missing:
            raise ConvertError(f"{save_dir / missing[0]} is gone from a finished conversion: choose another directory")
        return manifest
    what = "a checkpoint that is no conversion" if manifest is None else "the conversion of another checkpoint"
    raise ConvertError(f"{save_dir} holds {what}: choose another save directory, or remove it")


def _finished(model_dir: Path, save_dir: Path, shard: str) -> ShardRecord | None:
    """The record of a shard that was converted from exactly this source, and is still there in full size."""
    path = save_dir / RECORDS / f"{shard}.json"
    if not path.is_file():
        return None
    record = ShardRecord(**json.loads(path.read_text()))
    source, result = model_dir / shard, save_dir / shard
    if record.source_size != source.stat().st_size or record.source_header != _header_digest(source):
        raise ConvertError(
            f"{save_dir} holds a conversion of another {shard} than {source}: choose another save directory"
        )
    return record if result.is_file() and result.stat().st_size == record.size else None


def _complete(
    model_dir: Path,
    save_dir: Path,
    config: dict[str, Any],
    checkpoint: NativeCheckpoint,
    source: str,
    records: list[ShardRecord],
) -> dict[str, Any]:
    carry_files(model_dir, save_dir)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    plain["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    _write_json(save_dir / "config.json", plain)
    weight_map = {
        name.removesuffix(PACKED) + WEIGHT if name.endswith(PACKED) else name: shard
        for name, shard in checkpoint.shard_of.items()
        if not name.endswith(SCALE)
    }
    manifest = {
        "format": 1,
        "source": source,
        "source_index_sha256": hashlib.sha256((model_dir / INDEX).read_bytes()).hexdigest(),
        "files": [{"path": r.shard, "size": r.size, "sha256": r.sha256} for r in records],
        "experts": sum(r.experts for r in records),
    }
    _write_json(save_dir / MANIFEST, manifest)
    total = sum(_output_bytes(save_dir / record.shard) for record in records)
    _write_json(save_dir / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _remove_partial(save_dir)  # a process of a killed conversion may have begun one while it ended
    for path in (save_dir / RECORDS).iterdir():
        path.unlink()
    (save_dir / RECORDS).rmdir()
    return manifest


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(min(length, 256 << 20))).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    staging = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with staging.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)
