"""One optimizer step on a GPU against the same step on the CPU: loss, metrics, and every adapter gradient."""

import dataclasses

import pytest
import torch

from k31core.train.batch import loss_token_count, make_microbatches
from k31core.train.step import optimizer_step
from tests.unit.train.small_trainer import rollout, small_trainer
from tests.unit.train.test_step import GradientRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("bounded", "few_candidates"),
]
CUDA = ("train.device=cuda", "cluster.gpus_per_node=1")


def live(trainer):
    """Factors that are not zero, the same on every device and in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for slot in trainer.optimizer.slots:
            noise = torch.randn(slot.tensor.shape, generator=generator) * 0.05
            slot.tensor.add_(noise.to(slot.tensor))
    return trainer


def gradients(trainer, samples):
    recorder = GradientRecorder(trainer.optimizer.slots)
    batches = make_microbatches(samples, trainer._limits, tokens_per_gpu=64)
    settings = dataclasses.replace(trainer._settings, clip_grad=1e9)
    result = optimizer_step(trainer.decoder, recorder, batches, settings, normaliser=loss_token_count(samples), lr=1.0)
    return [g.cpu() for g in recorder.seen], result.metrics


@pytest.mark.parametrize("dtype,gradient,loss", [("float32", 2e-4, 1e-4), ("bfloat16", 0.15, 0.05)])
def test_step_on_the_gpu_equals_the_cpu(dtype, gradient, loss, say):
    reference = live(small_trainer())
    samples = rollout(reference, 1, count=16)
    expected, wanted = gradients(reference, samples)
    say("CPU step done")
    found, metrics = gradients(live(small_trainer(f"model.dtype={dtype}", *CUDA)), samples)
    total = torch.cat([g.flatten() for g in expected]).norm()
    difference = torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)]).norm()
    say(f"{dtype}: gradient off by {float(difference / total):.2e}, loss {metrics['train/loss']:.6f} "
          f"against {wanted['train/loss']:.6f}")  # fmt: skip
    assert difference < gradient * total
    assert metrics["train/loss"] == pytest.approx(wanted["train/loss"], abs=loss)
    for name in ("train/sc_tail_ratio", "train/sc_train_head_mass"):
        assert metrics[name] == pytest.approx(wanted[name], rel=0.05 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_on_the_gpu_train_export_and_restore(tmp_path, dtype, say):
    trainer = small_trainer(f"model.dtype={dtype}", *CUDA)
    samples = rollout_on(trainer)
    first = trainer.train(samples)
    say("first step", first.metrics["train/loss"])
    assert first.proof.startswith("first step: all")
    trainer.export(tmp_path, optimizer=True)
    other = small_trainer(f"model.dtype={dtype}", *CUDA)
    assert other.restore(tmp_path).not_restored == ()
    assert other.digest() == trainer.digest()
    say("restored")
    for a, b in zip(other.optimizer.state_slots(), trainer.optimizer.state_slots(), strict=True):
        assert torch.equal(a.tensor, b.tensor)
    assert len(trainer.score([1, 2, 3, 4])) == 3
    assert torch.isfinite(torch.tensor(list(trainer.train(samples).metrics.values()))).all()


def rollout_on(trainer):
    """A rollout that the CPU draws."""
    return rollout(small_trainer(), 6, count=8)
