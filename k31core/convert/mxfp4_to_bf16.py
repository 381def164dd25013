"""MXFP4 checkpoint to BF16 checkpoint: exact, streamed shard by shard, resumable, and proved by the inverse.

Every shard becomes a shard of the same name; a packed weight and its scale become one BF16 weight, everything else
(vision tensors too) is carried byte for byte. The index is written last: without it no reader takes the directory.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from k31core.checkpoint.native import INDEX, NativeCheckpoint
from k31core.checkpoint.tensor_file import Entry, TensorFile
from k31core.checkpoint.tensor_writer import TensorFileWriter
from k31core.convert.source import (
    PACKED,
    SCALE,
    WEIGHT,
    ConvertError,
    carry_files,
    check_free_space,
    check_target,
    open_mxfp4,
)
from k31core.ops.mxfp4 import MxFp4Error, decode

MANIFEST = "k31_conversion.json"
_PIECE = 64 << 20
"""Bytes of a carried tensor copied at a time."""
_RECORDS = ".converted"
"""Directory of one JSON record for each finished shard; removed when the conversion is complete."""


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

    Finished shards of an interrupted conversion are kept. `progress(done, total)` is called in bytes written.
    Raises ConvertError, CheckpointError, TensorFileError or MxFp4Error, by file and tensor.
    """
    check_target(model_dir, save_dir)
    config, checkpoint = open_mxfp4(model_dir)
    shards = sorted(set(checkpoint.shard_of.values()))
    records = save_dir / _RECORDS
    records.mkdir(parents=True, exist_ok=True)
    sizes = {shard: _output_bytes(model_dir / shard) for shard in shards}
    done = {shard: record for shard in shards if (record := _finished(model_dir, save_dir, shard)) is not None}
    check_free_space(save_dir, sum(size for shard, size in sizes.items() if shard not in done))
    total = sum(sizes.values())
    written = sum(sizes[shard] for shard in done)
    if progress is not None:
        progress(written, total)
    todo = [shard for shard in shards if shard not in done]
    for record in _run(model_dir, save_dir, todo, workers or os.cpu_count() or 1):
        done[record.shard] = record
        written += sizes[record.shard]
        if progress is not None:
            progress(written, total)
    return _complete(model_dir, save_dir, config, checkpoint, [done[shard] for shard in shards])


def _run(model_dir: Path, save_dir: Path, shards: list[str], workers: int) -> Iterator[ShardRecord]:
    if workers == 1 or len(shards) <= 1:
        for shard in shards:
            yield convert_shard(model_dir, save_dir, shard)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(workers, len(shards)), context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        jobs = [pool.submit(convert_shard, model_dir, save_dir, shard) for shard in shards]
        for job in as_completed(jobs):
            yield job.result()


def convert_shard(model_dir: Path, save_dir: Path, shard: str) -> ShardRecord:
    """Convert one shard; at most one decoded weight and one piece are in memory."""
    checkpoint = NativeCheckpoint(model_dir)
    partial, final = save_dir / f"{shard}.partial", save_dir / shard
    scales: dict[str, TensorFile] = {}
    experts = 0
    try:
        with TensorFile(model_dir / shard) as file, TensorFileWriter(partial, _layout(file)) as writer:
            for name, entry in _in_file_order(file):
                if name.endswith(PACKED):
                    weight = _decoded(checkpoint, file, scales, name)
                    writer.write(name.removesuffix(PACKED) + WEIGHT, weight)
                    experts += 1
                elif not name.endswith(SCALE):
                    for piece in _pieces(file, name, entry):
                        writer.write(name, piece)
            written = writer.finish()
    finally:
        for opened in scales.values():
            opened.close()
    os.replace(partial, final)
    source = model_dir / shard
    record = ShardRecord(shard, source.stat().st_size, _header_digest(source), written.size, written.sha256, experts)
    _write_json(save_dir / _RECORDS / f"{shard}.json", asdict(record))
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


def _decoded(checkpoint: NativeCheckpoint, file: TensorFile, scales: dict[str, TensorFile], name: str) -> torch.Tensor:
    scale = scale_of(checkpoint, file, scales, name)
    try:
        return decode(file.read(name), scale, torch.bfloat16)
    except MxFp4Error as error:
        raise ConvertError(f"{file.path}: {name}: {error}") from error


def scale_of(
    checkpoint: NativeCheckpoint, file: TensorFile, opened: dict[str, TensorFile], packed_name: str
) -> torch.Tensor:
    """The scale tensor that belongs to a packed one; `opened` keeps other shards open when it is in one of them."""
    name = packed_name.removesuffix(PACKED) + SCALE
    shard = checkpoint.shard_of.get(name)
    if shard is None:
        raise ConvertError(f"{checkpoint.directory / INDEX}: {packed_name} has no scale tensor {name}")
    owner = file if shard == file.path.name else opened.get(shard)
    if owner is None:
        owner = opened[shard] = TensorFile(checkpoint.directory / shard)
    if name not in owner.entries:
        raise ConvertError(f"{owner.path}: the index says {name} is here, the file has no such tensor")
    return owner.read(name)


def _pieces(file: TensorFile, name: str, entry: Entry) -> Iterator[torch.Tensor]:
    if entry.nbytes <= _PIECE or not entry.shape:
        yield file.read(name)
        return
    rows = max(1, _PIECE // (entry.nbytes // entry.shape[0]))
    for start in range(0, entry.shape[0], rows):
        yield file.read(name, 0, start, min(rows, entry.shape[0] - start))


def _output_bytes(path: Path) -> int:
    with TensorFile(path) as file:
        return sum(
            entry.nbytes * (4 if name.endswith(PACKED) else 1)
            for name, entry in file.entries.items()
            if not name.endswith(SCALE)
        )


def _finished(model_dir: Path, save_dir: Path, shard: str) -> ShardRecord | None:
    """The record of a shard that was converted from exactly this source, and is still there in full size."""
    path = save_dir / _RECORDS / f"{shard}.json"
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
    model_dir: Path, save_dir: Path, config: dict[str, Any], checkpoint: NativeCheckpoint, records: list[ShardRecord]
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
        "source_index_sha256": hashlib.sha256((model_dir / INDEX).read_bytes()).hexdigest(),
        "files": [{"path": r.shard, "size": r.size, "sha256": r.sha256} for r in records],
        "experts": sum(r.experts for r in records),
    }
    _write_json(save_dir / MANIFEST, manifest)
    total = sum(_output_bytes(save_dir / record.shard) for record in records)
    _write_json(save_dir / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for record in records:
        (save_dir / _RECORDS / f"{record.shard}.json").unlink()
    (save_dir / _RECORDS).rmdir()
    return manifest


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(min(length, 256 << 20))).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
