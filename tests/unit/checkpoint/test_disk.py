"""A disk that is really full, or really read-only: a small file system of its own, mounted for the test."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from k31core.checkpoint import commit as commits
from k31core.checkpoint.adapter import AdapterConfig, write_adapter, write_adapter_together
from k31core.checkpoint.commit import CommitError
from k31core.checkpoint.lock import holder
from k31core.checkpoint.optimizer_state import write_optimizer_state
from k31core.checkpoint.store import RunStore, StoreError, create_run
from k31core.observe.jsonl import Journal, JournalError, write_atomic
from k31core.observe.ledger import Phase
from k31core.parallel.sharding import Shard, Slot, Stored
from k31core.recipe.load import load_recipe, resolve
from tests.unit.train.small_trainer import rollout, small_trainer

MIB = 1024**2
CONFIG = AdapterConfig(4, 8.0, None)
TENSOR = torch.arange(MIB // 2, dtype=torch.float32)  # 2 MiB


class Disk:
    """A file system of 40 MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int) -> None:
        """Take everything but `left` bytes (rounded to pages)."""
        free = shutil.disk_usage(self.path).free
        with (self.path / "filler").open("wb") as file:
            file.write(bytes(max(0, free - left)))
        assert shutil.disk_usage(self.path).free <= max(left, 0) + 4096

    def free(self) -> None:
        (self.path / "filler").unlink()

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={40 * MIB}", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def store(disk: Disk) -> Iterator[RunStore]:
    """A run on the small disk with a save after step 5."""
    with RunStore(create_run(disk.path, "run", resolve(load_recipe("tiny")))) as store:
        with store.save_staging(5) as staging:
            write(staging)
            store.save_adapter(staging, 5, {})
        yield store


def write(staging: Path) -> None:
    """2 MiB of adapter and 2 MiB of optimizer state."""
    write_adapter(staging, CONFIG, {"w": TENSOR})
    write_optimizer_state(staging / "optimizer", [slot("w.exp_avg")], updates=1)


def slot(name: str) -> Slot:
    return Slot(name, TENSOR, Shard(tuple(TENSOR.shape), Stored.FACTOR))


def check_nothing_lost(store: RunStore) -> None:
    assert [path.name for path in (store.root / "adapters").iterdir()] == ["step-00005"]
    search = store.latest_valid_commit()
    assert search.commit is not None and search.commit.step == 5 and search.rejected == ()


@pytest.mark.parametrize("left", [MIB, 3 * MIB, 4 * MIB + 8192], ids=["adapter", "optimizer", "manifest"])
def test_a_disk_that_fills_up_during_a_save(disk: Disk, store: RunStore, left: int) -> None:
    """Whatever file is the one that does not fit."""
    with (
        pytest.raises(CommitError, match=r"filled up while step-00010 was written: it needs about 20\.\d MiB, .* free"),
        store.save_staging(10) as staging,
    ):
        disk.fill(left)
        write(staging)
        if left > 4 * MIB:
            disk.free()
            disk.fill(0)
        store.save_adapter(staging, 10, {})
    check_nothing_lost(store)
    disk.free()
    with store.save_staging(10) as staging:
        write(staging)
        store.save_adapter(staging, 10, {})
    assert store.latest_valid_commit().commit.step == 10


def test_a_disk_that_fills_up_under_several_writers(disk: Disk, store: RunStore) -> None:
    """The rank that lays the file out learns it before anybody has written; it keeps the system's own error."""
    seen: list[str | None] = []

    def agree(complaint: str | None) -> str | None:
        seen.append(complaint)
        return complaint

    with pytest.raises(CommitError, match="filled up"), store.save_staging(10) as staging:
        disk.fill(MIB)
        shapes = {"w": tuple(TENSOR.shape)}
        write_adapter_together(staging, CONFIG, shapes, [slot("w")], dtype=torch.float32, first=True, agree=agree)
    assert len(seen) == 1 and "No space left" in (seen[0] or "")
    check_nothing_lost(store)


def test_the_trainer_goes_on_after_a_full_disk(disk: Disk, store: RunStore, tmp_path: Path) -> None:
    trainer, undisturbed = small_trainer(), small_trainer()
    samples = [rollout(undisturbed, seed) for seed in range(2)]
    trainer.train(samples[0])
    with pytest.raises(CommitError, match="filled up"), store.save_staging(10) as staging:
        disk.fill(64 * 1024)
        trainer.export(staging, optimizer=True)
    check_nothing_lost(store)
    disk.free()
    trainer.train(samples[1])
    with store.save_staging(10) as staging:
        trainer.export(staging, optimizer=True)
        saved = store.save_adapter(staging, 10, {})
    for each in samples:
        undisturbed.train(each)
    (tmp_path / "other").mkdir()
    undisturbed.export(tmp_path / "other", optimizer=True)
    files = [path.relative_to(tmp_path / "other") for path in (tmp_path / "other").rglob("*") if path.is_file()]
    assert len(files) == 5
    assert all((saved.directory / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in files)


def test_too_little_room_is_said_before_anything_is_written(disk: Disk, store: RunStore) -> None:
    disk.fill(8 * MIB)
    with pytest.raises(CommitError, match=r"has 8\.0 MiB free, the save needs 20\.\d MiB"), store.save_staging(10):
        pytest.fail("the block must not be entered")
    check_nothing_lost(store)


def test_a_rollout_on_a_full_disk(disk: Disk, store: RunStore) -> None:
    """Its columns are written by safetensors' own code, whose error is not the system's."""
    final = store.rollout_dir(1)
    disk.fill(MIB)
    with (
        pytest.raises(CommitError, match=r"filled up while step-00001 was written: it needs about"),
        commits.staged(final, "rollout") as staging,
    ):
        save_file({"tokens": np.zeros(4 * MIB, dtype=np.uint8)}, staging / "samples.safetensors")
    assert list(final.parent.iterdir()) == []


def test_a_ledger_line_that_does_not_fit_is_taken_back(disk: Disk) -> None:
    journal = Journal(disk.path / "ledger.jsonl")
    journal.append({"seq": 1})
    disk.fill(8192)
    with pytest.raises(JournalError, match=r"ledger.jsonl cannot be written \(No space left on device\)"):
        journal.append({"seq": 2, "long": "x" * 100_000})
    assert (disk.path / "ledger.jsonl").read_bytes() == b'{"seq":1}\n'
    journal.append({"seq": 2})
    disk.free()
    journal.append({"seq": 3, "long": "x" * 100_000})
    again = Journal(disk.path / "ledger.jsonl")
    assert [record["seq"] for record in again.records] == [1, 2, 3] and again.note is None


def test_a_file_that_cannot_be_replaced_stays(disk: Disk) -> None:
    path = disk.path / "recipe.json"
    write_atomic(path, b"old")
    disk.fill(0)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"x" * MIB)
    assert path.read_bytes() == b"old" and {p.name for p in disk.path.iterdir()} == {"recipe.json", "filler"}


def test_a_full_disk_does_not_break_the_lock(disk: Disk, store: RunStore) -> None:
    store.close()
    (store.root / "lock").write_text("")
    disk.fill(0)
    with RunStore(store.root):
        assert holder(store.root / "lock") is not None
    assert holder(store.root / "lock") is None


def test_a_read_only_disk(disk: Disk, store: RunStore) -> None:
    store.close()
    disk.remount("ro")
    try:
        with pytest.raises(CommitError, match=r"step-00010 cannot be written \(Read-only file system\): make"):
            store.save_staging(10).__enter__()
        with pytest.raises(CommitError, match="Read-only"), commits.staged(store.rollout_dir(1), "rollout"):
            pytest.fail("the block must not be entered")
        with pytest.raises(JournalError, match=r"ledger.jsonl cannot be written \(Read-only file system\)"):
            store.ledger.append(Phase.TRAIN, 1)
        with pytest.raises(StoreError, match=r"cannot write the run directory .*Read-only"):
            RunStore(store.root)
        with pytest.raises(StoreError, match="choose another --save-dir"):
            create_run(disk.path, "other", resolve(load_recipe("tiny")))
        with pytest.raises(StoreError, match="choose another --save-dir"):
            create_run(disk.path, "run", resolve(load_recipe("tiny")))
    finally:
        disk.remount("rw")
    check_nothing_lost(store)
