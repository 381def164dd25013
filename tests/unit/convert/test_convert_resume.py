"""A conversion that is killed, repeated or run twice at once; and what it holds in memory."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from k31core.checkpoint.native import INDEX, NativeCheckpoint
from k31core.convert.mxfp4_to_bf16 import convert_shard, convert_to_bf16, scales_elsewhere
from k31core.convert.source import RECORDS, ConvertError, open_bf16
from k31core.convert.target_lock import TargetLock
from k31core.convert.verify_bf16 import verify_bf16
from tests.unit.convert.sources import CASE, change_byte, mxfp4_copy, shard_of, wide_source

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal, sys
from pathlib import Path
from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
sizes = []
def progress(done, total):  # the first call tells where it begins, the second comes with the first finished shard
    sizes.append(done)
    records = Path(sys.argv[2]) / ".converted"
    if any(records.glob("*.json")):
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    convert_to_bf16(Path(sys.argv[1]), Path(sys.argv[2]), workers=2, progress=progress)
"""


def python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )


def test_after_kill_9_finished_shards_are_kept_and_the_result_is_the_same(tmp_path: Path) -> None:
    source, target = wide_source(tmp_path / "mxfp4", [1, 2, 1]), tmp_path / "bf16"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = subprocess.run([sys.executable, script, source, target], cwd=ROOT, timeout=240, env=with_path())
    assert killed.returncode == -signal.SIGKILL
    assert not (target / INDEX).exists()
    with pytest.raises(ConvertError, match=r"is half-converted: run .* on its source again"):
        open_bf16(target)
    # A shard counts when its record is there; one that was renamed at the very end is converted again.
    finished = [target / record.name.removesuffix(".json") for record in (target / RECORDS).glob("*.json")]
    kept = {path: path.stat().st_mtime_ns for path in finished}
    assert len(kept) >= 1
    manifest = convert_to_bf16(source, target, workers=1)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert sorted(path.name for path in target.iterdir() if path.suffix == ".partial" or path.name == RECORDS) == []
    assert verify_bf16(source, target, workers=2) == {"experts": 12, "carried": 0}
    assert manifest == convert_to_bf16(source, tmp_path / "in-one-go", workers=1)


def with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_finished_conversion_is_returned_untouched(tmp_path: Path) -> None:
    manifest = convert_to_bf16(CASE, tmp_path / "bf16", workers=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "bf16").iterdir()}
    assert convert_to_bf16(CASE, tmp_path / "bf16", workers=1) == manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bf16").iterdir()} == before


def test_another_checkpoint_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    source = mxfp4_copy(tmp_path)
    convert_to_bf16(source, tmp_path / "bf16", workers=1)
    name = "language_model.model.embed_tokens.weight"
    change_byte(shard_of(source, name), name, 99)
    with pytest.raises(ConvertError, match="the conversion of another checkpoint: choose another save directory"):
        convert_to_bf16(source, tmp_path / "bf16", workers=1)


def test_a_finished_shard_of_another_source_is_refused(tmp_path: Path) -> None:
    source, target = mxfp4_copy(tmp_path), tmp_path / "bf16"
    (target / RECORDS).mkdir(parents=True)
    elsewhere = scales_elsewhere(NativeCheckpoint(source))
    convert_shard(source, target, "model-00001-of-00002.safetensors", elsewhere=elsewhere)
    other = source / "model-00001-of-00002.safetensors"
    other.write_bytes(other.read_bytes().replace(b"lm_head", b"lm_hepd"))
    with pytest.raises(ConvertError, match="another model-00001"):
        convert_to_bf16(source, target, workers=1)


def test_two_at_once_are_refused_by_the_holders_name(tmp_path: Path) -> None:
    (tmp_path / "bf16" / RECORDS).mkdir(parents=True)
    with (
        TargetLock(tmp_path / "bf16" / RECORDS / "lock"),
        pytest.raises(ConvertError, match=rf"being converted by process {os.getpid()}: wait for it"),
    ):
        convert_to_bf16(CASE, tmp_path / "bf16", workers=1)


MEASURED = """
import json, sys
from pathlib import Path
from k31core.convert.mxfp4_to_bf16 import convert_shard
from k31core.convert.verify_bf16 import verify_shard
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
source, target, shard = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
(target / ".converted").mkdir(parents=True)
before = peak()
convert_shard(source, target, shard, elsewhere={})
converted = peak()
verify_shard(source, target, shard, elsewhere={})
print(json.dumps([converted - before, peak() - before]))
"""


def test_memory_stays_below_two_shards(tmp_path: Path) -> None:
    """Peak resident memory of a process beyond its imports, on a shard of 3 experts at published widths."""
    source = wide_source(tmp_path / "mxfp4", [3])
    shard = "model-00001-of-00001.safetensors"
    size = (source / shard).stat().st_size
    done = python(MEASURED, source, tmp_path / "bf16", shard)
    assert done.returncode == 0, done.stderr
    converting, verifying = json.loads(done.stdout)
    assert converting < 2 * size and verifying < 2 * size
    # What it really is: a weight (22 MB decoded) with what the decoder needs beside it, whatever the shard's size.
    assert max(converting, verifying) < 150e6


def test_partial_files_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / "model-00001-of-00002.safetensors.4711.partial").write_text("half")
    convert_to_bf16(CASE, tmp_path / "bf16", workers=1)
    assert not [path for path in (tmp_path / "bf16").iterdir() if re.search("partial", path.name)]


def test_the_work_of_a_shard_crosses_processes() -> None:
    import pickle

    work = partial(convert_shard, CASE, CASE, elsewhere={})
    assert pickle.loads(pickle.dumps(work)).keywords == {"elsewhere": {}}
