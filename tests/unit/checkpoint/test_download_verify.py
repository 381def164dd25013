"""`verify-model`: digests, structure, belief in size and time, damage of every kind."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from k31core.checkpoint.verify_directory import verify_directory
from k31core.checkpoint.verify_files import (
    FILES_MANIFEST,
    FileEntry,
    FilesError,
    Finding,
    check_entries,
    digests,
    read_manifest,
    write_manifest,
)
from tests.hub_lookalike.server import git_blob_id

MODEL = Path(__file__).parents[2] / "cases" / "model" / "tiny-k31"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    return directory


def manifest(directory: Path) -> None:
    """A manifest as a download writes it."""
    entries = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        entries.append(
            FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest(), mtime_ns=path.stat().st_mtime_ns)
        )
    write_manifest(directory, {"repo": "org/model", "commit": "a" * 40}, entries)


def test_digests_are_those_of_independent_implementations(tmp_path: Path) -> None:
    for size in (0, 1, 5_000_000):
        data = os.urandom(size)
        (tmp_path / "f").write_bytes(data)
        expected = (hashlib.sha256(data).hexdigest(), git_blob_id(data))
        assert digests(tmp_path / "f", size, want_git=True) == expected


def test_a_check_is_incremental_and_full_on_demand(model: Path) -> None:
    manifest(model)
    total = sum(path.stat().st_size for path in model.iterdir() if path.name != FILES_MANIFEST)
    quick = verify_directory(model, full=False)
    assert (quick.problems, quick.hashed_bytes, quick.believed_files, quick.files) == ((), 0, 4, 4)
    full = verify_directory(model, full=True)
    assert (full.problems, full.hashed_bytes, full.commit) == ((), total, "a" * 40)
    os.utime(model / "config.json", ns=(1, 1))
    touched = verify_directory(model, full=False)
    assert (touched.hashed_bytes, touched.believed_files) == ((model / "config.json").stat().st_size, 3)
    assert verify_directory(model, full=False).hashed_bytes == 0, "the new time was recorded"


def test_same_size_and_time_hides_damage_only_from_the_quick_check(model: Path) -> None:
    manifest(model)
    shard = model / "model-00001-of-00002.safetensors"
    state = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert not verify_directory(model, full=False).problems
    (problem,) = verify_directory(model, full=True).problems
    assert (problem.path, problem.finding) == (shard.name, Finding.DIGEST)
    assert hashlib.sha256(data).hexdigest() in problem.detail


@pytest.mark.parametrize(
    ("damage", "finding", "detail"),
    [
        (lambda path: path.unlink(), Finding.MISSING, "is not there"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), Finding.SIZE, "bytes, expected"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), Finding.DIGEST, "has sha256"),
    ],
)
def test_damage_is_named(model: Path, damage: Any, finding: Finding, detail: str) -> None:
    manifest(model)
    damage(model / "model-00002-of-00002.safetensors")
    report = verify_directory(model, full=False)
    assert not report.recorded
    problem = report.problems[0]
    assert (problem.path, problem.finding) == ("model-00002-of-00002.safetensors", finding)
    assert detail in problem.detail
    assert any(line.startswith("WRONG model-00002") for line in report.lines())


def test_a_directory_without_manifest_is_checked_for_structure(model: Path) -> None:
    first = verify_directory(model, full=False)
    assert (first.problems, first.unvouched_files, first.commit) == ((), 4, None)
    assert verify_directory(model, full=False).hashed_bytes == 0
    (model / FILES_MANIFEST).unlink()
    shard = model / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    (model / "model-00002-of-00002.safetensors").unlink()
    (model / "config.json").write_text("{")
    found = {problem.path: problem.detail for problem in verify_directory(model, full=False).problems}
    assert "its header describes" in found["model-00001-of-00002.safetensors"]
    assert "is named by model.safetensors.index.json" in found["model-00002-of-00002.safetensors"]
    assert "is not JSON" in found["config.json"]
    assert not (model / FILES_MANIFEST).exists()


def test_digests_that_hf_download_left_are_used(model: Path) -> None:
    shard, config = model / "model-00001-of-00002.safetensors", model / "config.json"
    records = model / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    (records / f"{shard.name}.metadata").write_text(f"{'b' * 40}\n{sha256}\n1.0\n")
    (records / "config.json.metadata").write_text(f"{'b' * 40}\n{git_blob_id(config.read_bytes())}\n1.0\n")
    assert verify_directory(model, full=False).unvouched_files == 2
    (model / FILES_MANIFEST).unlink()
    config.write_bytes(config.read_bytes() + b"\n")
    (problem,) = verify_directory(model, full=False).problems
    assert problem.path == "config.json" and "git sha1" in problem.detail


def test_odd_directories(tmp_path: Path, model: Path) -> None:
    with pytest.raises(FilesError, match="no such directory"):
        verify_directory(tmp_path / "nothing", full=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FilesError, match="holds no files"):
        verify_directory(tmp_path / "empty", full=False)
    manifest(model)
    (model / "extra.txt").write_text("x")
    assert verify_directory(model, full=False).extra_files == ("extra.txt",)
    content = json.loads((model / FILES_MANIFEST).read_text())
    content["files"][0]["path"] = "../../etc/passwd"
    for broken in ("{", json.dumps({**content}), json.dumps({"format": 1, "files": [{"x": 1}]})):
        (model / FILES_MANIFEST).write_text(broken)
        with pytest.raises(FilesError, match="not a manifest of ours"):
            read_manifest(model)


def test_large_and_many_files_are_read_once(tmp_path: Path) -> None:
    for number in range(20):
        save_file({"w": np.full(10_000 + number, number, dtype=np.float32)}, tmp_path / f"{number}.safetensors")
    entries = [FileEntry(p.name, p.stat().st_size) for p in tmp_path.iterdir()]
    read: list[int] = []
    report = check_entries(tmp_path, entries, full=True, workers=3, progress=read.append)
    assert sum(read) == report.hashed_bytes == sum(entry.size for entry in entries)
    assert [entry.path for entry in report.entries] == sorted(entry.path for entry in entries)
