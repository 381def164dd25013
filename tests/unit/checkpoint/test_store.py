"""The run directory: commits, the search for the newest valid one, retention, recipes, locks."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from k31core.checkpoint import commit as commits
from k31core.checkpoint.commit import CommitError
from k31core.checkpoint.finite import TensorFileError, check_finite
from k31core.checkpoint.lock import LockedError, RunLock, holder
from k31core.checkpoint.retention import steps_to_keep
from k31core.checkpoint.store import RunStore, StoreError, create_run, latest_valid_commit, run_ids
from k31core.recipe.errors import RecipeError
from k31core.recipe.load import load_recipe, read_resolved, resolve


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return create_run(tmp_path, "run-a", resolve(load_recipe("tiny")))


def save(store: RunStore, step: int, value: float = 1.0) -> Path:
    staging = commits.new_staging(store.adapter_dir(step))
    save_file({"w": np.full(64, value * step, dtype=np.float32)}, staging / "adapter_model.safetensors")
    (staging / "adapter_config.json").write_text("{}")
    return store.save_adapter(staging, step, {"cursor": {"position": step}}).directory


def rollout(store: RunStore, step: int) -> Path:
    with commits.staged(store.rollout_dir(step), "rollout", {"policy_version": step - 1}) as staging:
        (staging / "samples.bin").write_bytes(b"s" * step)
    return store.rollout_dir(step)


def test_a_save_is_found_again_with_its_facts(root: Path) -> None:
    with RunStore(root) as store:
        save(store, 5)
        save(store, 10)
    search = latest_valid_commit(root)
    assert search.commit is not None and search.rejected == ()
    assert (search.commit.step, search.commit.facts["cursor"]) == (10, {"position": 10})


DAMAGES = {
    "truncated": (lambda d: _edit(d / "adapter_model.safetensors", lambda b: b[:-3]), "truncated"),
    "bit-flipped": (lambda d: _edit(d / "adapter_model.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])), "digest"),
    "empty": (lambda d: _edit(d / "adapter_model.safetensors", lambda b: b""), "truncated"),
    "missing": (lambda d: (d / "adapter_model.safetensors").unlink(), "is missing"),
    "renamed": (lambda d: (d / "adapter_config.json").rename(d / "config.json"), "adapter_config.json is missing"),
    "extra": (lambda d: (d / "note.txt").write_text("x"), "not in the manifest"),
    "manifest edited": (
        lambda d: _edit(d / "manifest.json", lambda b: b.replace(b'"size": 2\n', b'"size": 3\n')),
        "digest",
    ),
    "facts edited": (
        lambda d: _edit(d / "manifest.json", lambda b: b.replace(b'"position": 10', b'"position": 9')),
        "digest",
    ),
    "manifest torn": (lambda d: _edit(d / "manifest.json", lambda b: b[: len(b) // 2]), "damaged"),
}


def _edit(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_save_is_named_and_the_older_one_offered(root: Path, damage: str) -> None:
    with RunStore(root) as store:
        save(store, 5)
        newest = save(store, 10)
    change, word = DAMAGES[damage]
    change(newest)
    before = sorted(p.name for p in newest.iterdir())
    search = latest_valid_commit(root)
    assert search.commit is not None and search.commit.step == 5
    assert len(search.rejected) == 1
    directory, why = search.rejected[0]
    assert directory == newest and word in why and str(newest) in why
    assert sorted(p.name for p in newest.iterdir()) == before, "looking must not change anything"


def test_a_save_whose_manifest_agrees_but_whose_values_are_not_finite(root: Path) -> None:
    """Somebody wrote the manifest anew: only the finite check on read is left."""
    with RunStore(root) as store:
        save(store, 5)
        newest = save(store, 10)
    file, path = newest / "adapter_model.safetensors", newest / commits.MANIFEST
    save_file({"w": np.full(64, np.nan, dtype=np.float32)}, file)
    manifest = json.loads(path.read_text())
    for entry in manifest["files"]:
        if entry["path"] == file.name:
            entry.update(size=file.stat().st_size, sha256=commits.sha256_file(file))
    path.write_text(json.dumps({**manifest, "digest": commits.digest_of(manifest["files"])}))
    search = latest_valid_commit(root)
    assert search.commit is not None and search.commit.step == 5
    assert "tensor w holds NaN" in search.rejected[0][1] and str(file) in search.rejected[0][1]


def test_a_save_of_another_run_is_not_taken(root: Path, tmp_path: Path) -> None:
    other = create_run(tmp_path, "run-b", resolve(load_recipe("tiny")))
    with RunStore(root) as store:
        directory = save(store, 5)
    (other / "adapters").mkdir()
    directory.rename(other / "adapters" / "step-00005")
    search = latest_valid_commit(other)
    assert search.commit is None and "belongs to run 'run-a'" in search.rejected[0][1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_a_value_that_is_not_finite_is_never_committed(root: Path, value: float, dtype: str) -> None:
    with RunStore(root) as store:
        save(store, 5)
        staging = commits.new_staging(store.adapter_dir(10))
        tensor = np.ones(1000, dtype=dtype)
        tensor[777] = value
        save_file({"layers.3.lora_B": tensor}, staging / "adapter_model.safetensors")
        with pytest.raises(TensorFileError, match=r"layers\.3\.lora_B"):
            store.save_adapter(staging, 10, {})
    search = latest_valid_commit(root)
    assert search.commit is not None and search.commit.step == 5


def test_finite_check_of_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    path = tmp_path / "t.safetensors"
    tensor = torch.randn(100).to(torch.bfloat16)
    tensor[3] = 3.3895313892515355e38  # the largest finite one
    save_torch({"x": tensor}, path)
    check_finite(path)
    for bad in (float("nan"), float("inf"), float("-inf")):
        tensor[50] = bad
        save_torch({"x": tensor}, path)
        with pytest.raises(TensorFileError, match="tensor x"):
            check_finite(path)


def test_an_error_while_writing_leaves_the_old_commit(root: Path) -> None:
    with RunStore(root) as store:
        directory = rollout(store, 1)
        content = (directory / "samples.bin").read_bytes()
        with pytest.raises(CommitError, match="filled up"), commits.staged(directory, "rollout", {}) as staging:
            (staging / "samples.bin").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        assert (directory / "samples.bin").read_bytes() == content
        assert [p.name for p in directory.parent.iterdir()] == ["step-00001"]


def test_committing_the_same_bytes_again_keeps_the_first(root: Path) -> None:
    with RunStore(root) as store:
        first = save(store, 5)
        inode = (first / "manifest.json").stat().st_ino
        save(store, 5)
        assert (first / "manifest.json").stat().st_ino == inode
        save(store, 5, value=2.0)
        assert [p.name for p in sorted((root / "adapters").iterdir())] == ["step-00005", "step-00005.replaced-1"]
        assert latest_valid_commit(root).commit is not None


def test_a_killed_writer_is_cleaned_up_by_the_next_holder(root: Path) -> None:
    with RunStore(root) as store:
        save(store, 5)
        staging = commits.new_staging(store.adapter_dir(10))
        (staging / "half.safetensors").write_bytes(b"x" * 10)
    with RunStore(root) as store:
        assert not staging.exists()
        assert store.latest_valid_commit().commit.step == 5


def test_too_little_space_is_said_before_anything_is_written(root: Path) -> None:
    with RunStore(root) as store:
        save(store, 5)
        with pytest.raises(CommitError, match=r"MiB free, the save needs .* MiB"):
            commits.require_free_space(root, 1 << 60)
        store.require_space_for_save()


def test_a_disk_that_fills_up_during_a_save_loses_nothing(root: Path) -> None:
    with RunStore(root) as store:
        save(store, 5)
        with (
            pytest.raises(CommitError, match=r"filled up while step-00010 was written: it needs about 16\.\d MiB"),
            store.save_staging(10) as staging,
        ):
            (staging / "adapter_model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        assert [p.name for p in (root / "adapters").iterdir()] == ["step-00005"]
        with (
            pytest.raises(CommitError, match=r"step-00010 cannot be written \(Permission denied\)"),
            store.save_staging(10),
        ):
            raise PermissionError(13, "Permission denied")
        with pytest.raises(OSError, match="Input/output"), store.save_staging(10):
            raise OSError(5, "Input/output error")
        assert store.latest_valid_commit().commit.step == 5


def test_rollouts_are_reused_by_version_and_set_aside_when_bad(root: Path) -> None:
    with RunStore(root) as store:
        directory = rollout(store, 3)
        assert store.committed_rollout(3, policy_version=2) is not None
        assert store.committed_rollout(4, policy_version=3) is None
        (directory / "samples.bin").write_bytes(b"tts")
        assert store.committed_rollout(3, policy_version=2) is None
        assert not directory.exists() and (root / "rollouts" / "step-00003.bad-1").exists()
        rollout(store, 3)
        assert store.committed_rollout(3, policy_version=1) is None, "drawn by another adapter"
        assert (root / "rollouts" / "step-00003.stale-1").exists()


def test_retention_keeps_what_a_resume_needs(root: Path) -> None:
    with RunStore(root) as store:
        for step in range(1, 8):
            rollout(store, step)
        for step in (2, 4, 5):
            save(store, step)
        store.apply_retention()
        assert sorted(p.name for p in (root / "adapters").iterdir()) == ["step-00004", "step-00005"]
        assert [p.name[-1] for p in sorted((root / "rollouts").iterdir())] == ["4", "5", "6", "7"]
        # the newest save turns bad: the rollouts after the older one must not go
        _edit(root / "adapters" / "step-00005" / "adapter_config.json", lambda b: b"[]")
        store.apply_retention()
        assert (root / "adapters" / "step-00004").exists()
        assert [p.name[-1] for p in sorted((root / "rollouts").iterdir())] == ["4", "5", "6", "7"]


def test_retention_rule() -> None:
    assert steps_to_keep([5, 10, 15, 20], keep_last=2, keep_every=0) == {15, 20}
    assert steps_to_keep([5, 10, 15, 20, 25], keep_last=1, keep_every=10) == {10, 20, 25}
    assert steps_to_keep([5, 10, 15], keep_last=1, keep_every=0, protected=[5]) == {5, 15}
    assert steps_to_keep([], keep_last=2, keep_every=5) == set()


def test_order_is_by_step_and_not_by_the_clock(root: Path) -> None:
    with RunStore(root) as store:
        newest = save(store, 10)
        older = save(store, 5)
        os.utime(newest / "manifest.json", (1, 1))
        os.utime(newest, (1, 1))
    assert older.exists() and latest_valid_commit(root).commit.step == 10


def _try_to_open(root: str, queue) -> None:
    try:
        RunStore(Path(root))
    except LockedError as error:
        queue.put(str(error))


def test_two_processes_on_one_run_directory(root: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with RunStore(root):
        assert f"process {os.getpid()}" in (holder(root / "lock") or "")
        child = context.Process(target=_try_to_open, args=(str(root), queue))
        child.start()
        child.join(30)
    message = queue.get(timeout=5)
    assert f"process {os.getpid()} on " in message and "--run-id" in message
    assert holder(root / "lock") is None
    RunLock(root / "lock").acquire()


def test_another_recipe_is_refused_field_by_field(tmp_path: Path) -> None:
    create_run(tmp_path, "r", resolve(load_recipe("tiny", ["train.optimizer.lr=2e-3"])))
    other = load_recipe("tiny", ["train.optimizer.lr=1e-3", "save.interval=2"])
    with pytest.raises(RecipeError) as caught:
        create_run(tmp_path, "r", resolve(other))
    text = str(caught.value)
    assert "train.optimizer.lr: 0.002 -> 0.001 (not allowed)" in text
    assert "save.interval: 5 -> 2 (allowed)" in text
    assert read_resolved(tmp_path / "r" / "recipe.json").recipe.save.interval == 5


def test_an_allowed_change_is_stored_and_the_old_recipe_kept(tmp_path: Path) -> None:
    root = create_run(tmp_path, "r", resolve(load_recipe("tiny")))
    create_run(tmp_path, "r", resolve(load_recipe("tiny", ["num_rollout=50"])))
    assert read_resolved(root / "recipe.json").recipe.num_rollout == 50
    assert json.loads((root / "recipe-1.json").read_text())["recipe"]["num_rollout"] == 40


def test_a_directory_that_is_no_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="not empty and is not a run directory"):
        create_run(tmp_path, "r", resolve(load_recipe("tiny")))
    with pytest.raises(StoreError, match="runs in"):
        create_run(tmp_path, "gone", resolve(load_recipe("tiny")), must_exist=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the run directory"):
        create_run(tmp_path / "file", "r", resolve(load_recipe("tiny")))
    assert run_ids(tmp_path) == []
