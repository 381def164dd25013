"""One optimizer step: against an independent computation, invariances, proofs, and what a failing step leaves."""

import dataclasses

import numpy as np
import pytest
import torch

from k31core.model.decoder import Packed
from k31core.train.adamw import AdamSettings, AdamW
from k31core.train.batch import loss_token_count, make_microbatches
from k31core.train.gradients import NonFiniteGradientError, ZeroGradientError
from k31core.train.step import optimizer_step, run_in_order
from tests.unit.train.small_trainer import rollout, small_trainer


class GradientRecorder:
    """An optimizer that takes no step: keeps what it was given."""

    def __init__(self, slots):
        self.slots, self.updates, self.seen = slots, 0, None

    def apply(self, gradients, *, lr):
        self.seen = [g.clone() for g in gradients]


def gradients_of(trainer, samples, tokens_per_gpu=256, **changes):
    recorder = GradientRecorder(trainer.optimizer.slots)
    batches = make_microbatches(samples, trainer._limits, tokens_per_gpu=tokens_per_gpu)
    settings = dataclasses.replace(trainer._settings, clip_grad=1e9)
    result = optimizer_step(
        trainer.decoder, recorder, batches, settings, normaliser=loss_token_count(samples), lr=1.0, **changes
    )
    return recorder.seen, result.metrics, len(batches)


def assert_same(first, second, tolerance=2e-6):
    scale = max(float(g.abs().max()) for g in first)
    for a, b in zip(first, second, strict=True):
        assert float((a - b).abs().max()) <= tolerance * max(1.0, scale)


@pytest.fixture
def warm():
    """A trainer whose B factors are not zero, so that every gradient is live."""
    trainer = small_trainer()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for slot in trainer.optimizer.slots:
            slot.tensor.add_(torch.randn(slot.tensor.shape, generator=generator) * 0.05)
    return trainer


def test_loss_and_gradients_equal_a_computation_one_token_at_a_time(warm):
    samples = rollout(warm, 1)
    gradients, metrics, _ = gradients_of(warm, samples)
    total = 0.0
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.response]).astype(np.int64))
        routing = torch.from_numpy(np.concatenate([sample.routing, sample.routing[-1:]]))
        hidden = warm.decoder(Packed(ids, torch.tensor([0, len(ids)]), routing))
        log_p = torch.log_softmax(warm.decoder.logits(hidden).double(), -1)
        for j, token in enumerate(sample.response.tolist()):
            row = log_p[len(sample.prompt) - 1 + j]
            head, q = sample.top_ids[j].tolist(), np.exp(sample.top_logprobs[j].astype(np.float64))
            p = row[head].detach().exp().numpy()
            rho = max(1 - q.sum(), 1e-6) / max(1 - p.sum(), 1e-6)
            coef = torch.from_numpy(q - rho * p)
            total = total - sample.advantage * (row[token] - (coef * row[head]).sum())
    total = total / sum(len(s.response) for s in samples)
    expected = torch.autograd.grad(total, [s.tensor for s in warm.optimizer.slots])
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-5)
    assert_same(expected, gradients)
    norm = torch.stack([g.double().square().sum() for g in expected]).sum().sqrt()
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics["train/grad_norm"] > 1e-3


def test_packing_order_and_masked_samples_change_nothing(warm):
    samples = rollout(warm, 2, count=8)
    whole, metrics, one = gradients_of(warm, samples)
    packed, packed_metrics, many = gradients_of(warm, samples, tokens_per_gpu=20)
    assert (one, many > 4) == (1, True)
    assert_same(whole, packed)
    reordered, _, _ = gradients_of(warm, samples[::-1], tokens_per_gpu=40)
    assert_same(whole, reordered)
    extra = dataclasses.replace(rollout(warm, 9, count=1)[0], sample_id="masked", masked=True)
    with_masked, masked_metrics, _ = gradients_of(warm, [*samples, extra])
    assert_same(whole, with_masked)
    for name in ("train/loss", "train/train_rollout_kl", "train/sc_tail_ratio", "train/loss_tokens"):
        assert packed_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-9)
        assert masked_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-9)


def test_recomputation_changes_nothing(warm):
    samples = rollout(warm, 3)
    with_recompute, _, _ = gradients_of(warm, samples)
    warm.decoder.build = dataclasses.replace(warm.decoder.build, recompute=False)
    without, _, _ = gradients_of(warm, samples)
    assert_same(with_recompute, without, 0.0)


def test_recorded_routing_is_replayed(warm):
    samples = rollout(warm, 4)
    live = [dataclasses.replace(s, routing=None) for s in samples]
    same, _, _ = gradients_of(warm, samples)
    warm._limits = dataclasses.replace(warm._limits, replay_routing=False)
    routed_live, _, _ = gradients_of(warm, live)
    assert_same(same, routed_live)  # what was recorded is what the model would choose
    warm._limits = dataclasses.replace(warm._limits, replay_routing=True)
    other = [dataclasses.replace(s, routing=((s.routing + 1) % 8).astype(np.int16)) for s in samples]
    changed, metrics, _ = gradients_of(warm, other)
    assert max(float((a - b).abs().max()) for a, b in zip(same, changed)) > 1e-4
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.01


def test_agreement_is_zero_for_the_trainers_own_log_probs():
    trainer = small_trainer()
    samples = rollout(trainer, 5)
    exact = []
    for sample in samples:
        tokens = np.concatenate([sample.prompt, sample.response]).tolist()
        logprobs = trainer.score(tokens)[len(sample.prompt) - 1 :]
        exact.append(dataclasses.replace(sample, logprobs=np.array(logprobs, np.float32)))
    _, metrics, _ = gradients_of(trainer, exact)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 2e-6
    _, metrics, _ = gradients_of(trainer, samples)
    assert metrics["train/train_rollout_logprob_abs_diff"] > 1e-2


def test_first_step_proves_every_b_and_no_a():
    trainer = small_trainer()
    result = trainer.train(rollout(trainer, 6))
    slots = trainer.optimizer.slots
    b = [s for s in slots if ".lora_B." in s.name]
    assert result.proof == (
        f"first step: all {len(b)} B factors have a gradient, all {len(slots) - len(b)} A factors have none"
    )
    assert all(bool(s.tensor.any()) for s in b)
    assert trainer.train(rollout(trainer, 7)).proof is None


def test_a_step_with_nothing_to_learn_leaves_the_proof_to_the_next():
    trainer = small_trainer()
    samples = rollout(trainer, 6)
    result = trainer.train([dataclasses.replace(s, advantage=0.0) for s in samples])
    assert result.proof is None
    assert result.metrics["train/grad_norm"] == 0.0
    assert trainer.train(samples).proof is not None


def snapshot(trainer):
    state = [s.tensor.detach().clone() for s in (*trainer.optimizer.slots, *trainer.optimizer.state_slots())]
    return state, trainer.optimizer.updates, trainer.steps_done


def assert_untouched(trainer, before):
    state, updates, steps = snapshot(trainer)
    assert (updates, steps) == before[1:]
    assert all(torch.equal(a, b) for a, b in zip(state, before[0], strict=True))


def test_a_loss_that_does_not_reach_the_adapter_is_refused_by_name():
    trainer = small_trainer()

    def disconnected(decoder, batches, head_loss):
        return run_in_order(decoder, batches, lambda hidden, chunk: head_loss(hidden * 0 + hidden.detach(), chunk))

    trainer._schedule = disconnected
    before = snapshot(trainer)
    with pytest.raises(ZeroGradientError, match=r"lora_B\.weight and \d+ more B factors"):
        trainer.train(rollout(trainer, 6))
    assert_untouched(trainer, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_stops_the_step_and_names_the_factor(warm, value):
    samples = rollout(warm, 8)
    warm._prove = False
    warm.train(samples)
    before = snapshot(warm)
    target = warm.optimizer.slots[5]

    def poisoned(decoder, batches, head_loss):
        outputs = run_in_order(decoder, batches, head_loss)
        target.tensor.grad.view(-1)[0] = value
        return outputs

    warm._schedule = poisoned
    with pytest.raises(NonFiniteGradientError, match=target.name.replace(".", r"\.") + " and 0 more"):
        warm.train(samples)
    assert_untouched(warm, before)
    warm._schedule = None
    assert np.isfinite(warm.train(samples).metrics["train/loss"])


def test_the_norm_is_reported_before_clipping():
    trainer = small_trainer("train.optimizer.clip_grad=1.0e-3")
    samples = rollout(trainer, 6)
    recorder = GradientRecorder(trainer.optimizer.slots)
    batches = make_microbatches(samples, trainer._limits, tokens_per_gpu=256)
    result = optimizer_step(
        trainer.decoder, recorder, batches, trainer._settings, normaliser=loss_token_count(samples), lr=1.0
    )
    clipped = torch.stack([g.double().square().sum() for g in recorder.seen]).sum().sqrt()
    assert result.metrics["train/grad_norm"] > 1e-2
    assert float(clipped) == pytest.approx(1e-3, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_follows_torch(dtype):
    trainer = small_trainer()
    slots = [
        dataclasses.replace(s, tensor=torch.nn.Parameter(s.tensor.detach().to(dtype)))
        for s in trainer.optimizer.slots[:4]
    ]
    masters = [torch.nn.Parameter(s.tensor.detach().float().clone()) for s in slots]
    ours = AdamW(slots, AdamSettings(0.9, 0.98, 1e-8, 0.1))
    theirs = torch.optim.AdamW(masters, lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        gradients = [torch.randn(m.shape, generator=generator) for m in masters]
        for master, gradient in zip(masters, gradients):
            master.grad = gradient.clone()
        theirs.param_groups[0]["lr"] = 3e-3 / (step + 1)
        theirs.step()
        ours.apply(gradients, lr=3e-3 / (step + 1))
    for slot, master in zip(slots, masters):
        assert torch.allclose(slot.tensor.float(), master.detach().to(dtype).float(), rtol=1e-6, atol=1e-8)
    kinds = {s.name.rsplit(".", 1)[1] for s in ours.state_slots()}
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == torch.bfloat16 else set())


def test_half_precision_factors_sum_microbatch_gradients_in_float32(warm):
    samples = rollout(warm, 2, count=8)
    half = small_trainer("model.dtype=bfloat16")
    with torch.no_grad():
        for target, source in zip(half.optimizer.slots, warm.optimizer.slots, strict=True):
            target.tensor.copy_(source.tensor)
    one, _, _ = gradients_of(half, samples)
    many, _, count = gradients_of(half, samples, tokens_per_gpu=20)
    assert count > 4
    assert all(g.dtype == torch.float32 for g in many)
    largest = max(float(g.abs().max()) for g in one)
    assert max(float((a - b).abs().max()) for a, b in zip(one, many)) < 0.05 * largest
