"""Export and restore: bit-exact continuation, resharding of optimizer state, what is refused or named as missing."""

import dataclasses
import json
import shutil

import pytest
import torch

from k31core.checkpoint.optimizer_state import OptimizerStateError, read_optimizer_state, write_optimizer_state
from k31core.parallel.mesh import Axis, Mesh
from k31core.parallel.sharding import Shard, Slot, Stored
from k31core.train.state import LrSchedule, TrainerStateError, read_trainer_state
from k31core.train.trainer import ResumeError
from tests.unit.train.small_trainer import CASES, rollout, small_trainer


def files_of(directory):
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_a_restore_between_give_the_same_bytes(tmp_path, dtype):
    override = (f"model.dtype={dtype}", "train.optimizer.warmup_steps=3")
    first = small_trainer(*override)
    rollouts = [rollout(first, seed) for seed in range(4)]
    for samples in rollouts:
        first.train(samples)
    for name in ("whole", "half", "resumed"):
        (tmp_path / name).mkdir()
    first.export(tmp_path / "whole", optimizer=True)

    second = small_trainer(*override)
    for samples in rollouts[:2]:
        second.train(samples)
    second.export(tmp_path / "half", optimizer=True)
    torch.manual_seed(999)  # another process: nothing of the old random state is left
    third = small_trainer(*override)
    restored = third.restore(tmp_path / "half")
    assert restored.step == 2
    assert restored.not_restored == ()
    for samples in rollouts[2:]:
        third.train(samples)
    third.export(tmp_path / "resumed", optimizer=True)

    whole, resumed = files_of(tmp_path / "whole"), files_of(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert len(whole) == 5
    assert [name for name in whole if whole[name] != resumed[name]] == []
    assert whole["adapter_model.safetensors"] != files_of(tmp_path / "half")["adapter_model.safetensors"]


def test_a_failed_step_can_be_repeated_with_the_same_result(tmp_path):
    a, b = small_trainer(), small_trainer()
    samples = rollout(a, 1)
    broken = [*samples[:-1], dataclasses.replace(samples[-1], logprobs=samples[-1].logprobs * float("nan"))]
    with pytest.raises(ValueError, match="sample 0-2-1"):
        b.train(broken)
    a.train(samples)
    b.train(samples)
    assert all(torch.equal(x.tensor, y.tensor) for x, y in zip(a.optimizer.slots, b.optimizer.slots))


def test_what_is_missing_is_named(tmp_path):
    trainer = small_trainer()
    trainer.train(rollout(trainer, 0))
    trainer.export(tmp_path, optimizer=False)
    restored = small_trainer().restore(tmp_path)
    assert restored.step == 1
    assert any("Adam moments start from zero" in text for text in restored.not_restored)
    (tmp_path / "trainer_state.json").unlink()
    restored = small_trainer().restore(tmp_path)
    assert restored.step == 0
    assert len(restored.not_restored) == 3


def test_warm_start_takes_the_adapter_only():
    trainer = small_trainer(f"train.lora.warm_start={CASES / 'tiny-k31-adapter'}")
    restored = trainer.fresh()
    assert restored.step == 0
    assert "warm start" in restored.restored[0]
    assert all(bool(s.tensor.any()) for s in trainer.optimizer.slots)
    assert "warm start" in trainer.train(rollout(trainer, 1)).proof


def test_another_rank_or_schedule_is_refused_with_both_values(tmp_path):
    with pytest.raises(ResumeError, match=r"rank 4 and alpha 8, the recipe has train\.lora\.rank 2"):
        small_trainer("train.lora.rank=2").restore(CASES / "tiny-k31-adapter")
    trainer = small_trainer()
    trainer.export(tmp_path, optimizer=True)
    with pytest.raises(ResumeError, match="learning-rate schedule"):
        small_trainer("train.optimizer.lr=0.5").restore(tmp_path)


def test_another_target_set_is_refused_with_both_counts(tmp_path):
    """Also where a pipeline stage, which sees only its own layers, would find all it needs in the file."""
    small_trainer().export(tmp_path, optimizer=False)
    before = small_trainer("train.lora.target_modules=[experts,o_proj]")
    values = [s.tensor.detach().clone() for s in before.optimizer.slots]
    message = r"100 adapter tensors \(target_modules all-linear\), this run has 50 .*'experts', 'o_proj'"
    with pytest.raises(ResumeError, match=message):
        before.restore(tmp_path)
    before.decoder.build = dataclasses.replace(before.decoder.build, mesh=Mesh(pp=Axis(2, 0)))
    with pytest.raises(ResumeError, match="is only in the file"):
        before.restore(tmp_path)
    assert all(torch.equal(a, s.tensor) for a, s in zip(values, before.optimizer.slots, strict=True))


def test_damaged_trainer_state_is_refused(tmp_path):
    small_trainer().export(tmp_path, optimizer=False)
    path = tmp_path / "trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(TrainerStateError, match="format 99"):
        read_trainer_state(tmp_path)
    path.write_text(path.read_text()[:40])
    with pytest.raises(TrainerStateError, match="damaged"):
        read_trainer_state(tmp_path)


def test_learning_rate_warms_up_then_stays():
    schedule = LrSchedule(1.0, 4)
    assert [schedule.at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert LrSchedule(1.0, 0).at(0) == 1.0


WHOLE = torch.arange(48, dtype=torch.float32).view(6, 8)


def slot(name, dim, start, length, fill=True):
    shard = Shard((6, 8), Stored.FACTOR, dim, start, length)
    return Slot(name, shard.take(WHOLE).clone() if fill else torch.zeros(shard.local_shape), shard)


@pytest.mark.parametrize("dim,size", [(0, 6), (1, 8)])
@pytest.mark.parametrize("writers,readers", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 1)])
def test_optimizer_state_moves_between_layouts(tmp_path, dim, size, writers, readers):
    for rank in range(writers):
        part = slot("x.exp_avg", None if writers == 1 else dim, rank * size // writers, size // writers)
        write_optimizer_state(tmp_path, [part], updates=7, writer=rank, writers=writers)
    for rank in range(readers):
        target = slot("x.exp_avg", None if readers == 1 else dim, rank * size // readers, size // readers, fill=False)
        assert read_optimizer_state(tmp_path, [target]) == 7
        assert torch.equal(target.tensor, target.shard.take(WHOLE))


def test_incomplete_optimizer_state_is_refused(tmp_path):
    write_optimizer_state(tmp_path, [slot("x.exp_avg", 0, 0, 3)], updates=1, writer=0, writers=2)
    target = slot("x.exp_avg", None, 0, 0, fill=False)
    with pytest.raises(OptimizerStateError, match="1 of 2 writers"):
        read_optimizer_state(tmp_path, [target])
    write_optimizer_state(tmp_path, [slot("y.exp_avg", 0, 3, 3)], updates=1, writer=1, writers=2)
    with pytest.raises(OptimizerStateError, match=r"cover 3 of 6 entries along dimension 0"):
        read_optimizer_state(tmp_path, [target])
    with pytest.raises(OptimizerStateError, match=r"z\.exp_avg is missing"):
        read_optimizer_state(tmp_path, [slot("z.exp_avg", None, 0, 0, fill=False)])
    shutil.rmtree(tmp_path)
    with pytest.raises(OptimizerStateError, match="no optimizer state"):
        read_optimizer_state(tmp_path, [target])
    assert not target.tensor.any()


def test_non_finite_optimizer_state_is_never_written(tmp_path):
    bad = slot("x.exp_avg", None, 0, 0)
    bad.tensor[2, 3] = float("nan")
    with pytest.raises(OptimizerStateError, match=r"x\.exp_avg is not finite"):
        write_optimizer_state(tmp_path / "optimizer", [bad], updates=1)
    assert not (tmp_path / "optimizer").exists()
