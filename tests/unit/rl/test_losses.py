"""Advantages, the clipped policy gradient, agreement metrics, and the choice between losses."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k31core.rl.advantages import AdvantageError, group_advantages, shuffled_advantages
from k31core.rl.agreement import agreement_sums
from k31core.rl.candidates import CandidateMode
from k31core.rl.loss_records import LossInputError
from k31core.rl.losses import LossChoice, policy_loss
from k31core.rl.policy_gradient import grpo_loss
from tests.unit.rl.vocabulary import inputs_from_logits


def test_advantages_are_reward_minus_group_mean_without_division():
    assert group_advantages([1, 0, 0, 1, 0, 0, 0, 0]).tolist() == [0.75, -0.25, -0.25, 0.75] + [-0.25] * 4


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=32))
def test_advantages_sum_to_zero(rewards):
    assert math.fsum(group_advantages(rewards)) == pytest.approx(0.0, abs=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(2, 17))
def test_equal_rewards_give_exactly_zero(reward, size):
    assert (group_advantages([reward] * size) == 0).all()


@pytest.mark.parametrize("rewards,match", [([1.0], "group 4: 1 sample"), ([], "0 sample"), ([0, math.nan], "sample 1")])
def test_groups_without_a_baseline_are_refused(rewards, match):
    with pytest.raises(AdvantageError, match=match):
        group_advantages(rewards, where="group 4")


def test_shuffling_keeps_the_values_and_follows_its_key():
    values = np.arange(16.0)
    first = shuffled_advantages(values, 0, 3, 1)
    assert sorted(first) == sorted(values)
    assert (first == shuffled_advantages(values, 0, 3, 1)).all()
    assert (first != shuffled_advantages(values, 0, 3, 2)).any()


def make(seed=0, rows=4, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    q = torch.softmax(logits + spread * torch.randn(rows, 6, generator=generator, dtype=torch.float64), -1)
    logits.requires_grad_()
    return logits, inputs_from_logits(logits, q, [[0, 1, 2]] * rows, [3, 0, 5, 1], [1.0, -1.0, 0.5, -0.25])


def test_grpo_value_and_gradient_against_scalar_arithmetic():
    logits, inputs = make(seed=3, spread=0.6)
    out = grpo_loss(inputs, clip_low=0.2, clip_high=0.3, normaliser=5.0)
    out.loss.backward()
    p, expected, clipped = torch.softmax(logits.detach(), -1), 0.0, 0
    for i, token in enumerate(inputs.label_ids.tolist()):
        a, q = float(inputs.advantages[i]), math.exp(float(inputs.sampler_logprobs[i]))
        r = float(p[i, token]) / q
        c = min(max(r, 0.8), 1.3)
        expected -= min(r * a, c * a) / 5.0
        alive = r * a <= c * a
        clipped += not alive
        grad = [-(a * r * ((u == token) - float(p[i, u])) / 5.0) if alive else 0.0 for u in range(6)]
        assert logits.grad[i].tolist() == pytest.approx(grad, abs=1e-12)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)
    assert float(out.sums["train/clip_fraction"]) == clipped
    assert 0 < clipped < 4


def test_grpo_refuses_a_non_finite_log_prob_of_an_active_token_only():
    _, inputs = make()
    broken = inputs.logprobs.detach().clone()
    broken[2] = float("-inf")
    inputs = dataclasses.replace(inputs, logprobs=broken)
    with pytest.raises(LossInputError, match="sample 3-0-1, response position 9"):
        grpo_loss(inputs, clip_low=0.2, clip_high=0.2, normaliser=4.0)
    masked = dataclasses.replace(inputs, mask=torch.tensor([True, True, False, True]))
    assert torch.isfinite(grpo_loss(masked, clip_low=0.2, clip_high=0.2, normaliser=3.0).loss)


def test_agreement_against_scalar_arithmetic_with_clamp():
    p = torch.tensor([-1.0, -2.0, -30.0, float("nan")])
    q = torch.tensor([-1.5, -1.75, -1.0, -1.0])
    sums, peaks = agreement_sums(p, q, torch.tensor([True, True, True, False]))
    assert float(sums["train/train_rollout_logprob_abs_diff"]) == pytest.approx(0.5 + 0.25 + 29.0)
    kl = (math.exp(0.5) - 1.5) + (math.exp(-0.25) - 0.75) + (math.exp(-10) - 1 + 10)
    assert float(sums["train/train_rollout_kl"]) == pytest.approx(kl, rel=1e-6)
    assert float(peaks["train/train_rollout_logprob_abs_diff_max"]) == 29.0


@pytest.mark.parametrize("kind", ["score_centering", "grpo"])
def test_every_loss_reports_agreement_and_uses_the_normaliser(kind):
    _, inputs = make()
    one = policy_loss(inputs, LossChoice(kind), normaliser=1.0)
    ten = policy_loss(inputs, LossChoice(kind), normaliser=10.0)
    assert ten.loss.item() * 10 == pytest.approx(one.loss.item(), rel=1e-12)
    d = (inputs.logprobs - inputs.sampler_logprobs).detach()
    assert float(one.sums["train/train_rollout_logprob_abs_diff"]) == pytest.approx(float(d.abs().sum()), rel=1e-12)


def test_a_step_without_loss_tokens_is_refused():
    _, inputs = make()
    with pytest.raises(LossInputError, match="number of loss tokens is 0"):
        policy_loss(inputs, LossChoice("grpo"), normaliser=0)


def test_score_centering_without_candidates_says_what_to_set():
    _, inputs = make()
    inputs = dataclasses.replace(inputs, candidate_ids=None)
    with pytest.raises(LossInputError, match=r"rollout\.top_logprobs_num"):
        policy_loss(inputs, LossChoice("score_centering"), normaliser=1)


def test_grpo_under_filtered_sampling_compares_p_on_the_support():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 6, generator=generator, dtype=torch.float64).requires_grad_()
    q = torch.tensor([[0.7, 0.3, 0, 0, 0, 0], [0.2, 0.3, 0.5, 0, 0, 0]], dtype=torch.float64)
    inputs = inputs_from_logits(logits, q, [[0, 1], [2, 1, 0]], [1, 2], [1.0, -1.0])
    choice = LossChoice("grpo", mode=CandidateMode.SUPPORT, clip_low=0.9, clip_high=9.0)
    assert choice.needs_candidates
    out = policy_loss(inputs, choice, normaliser=2.0)
    p = torch.softmax(logits, -1)
    ratios = [p[0, 1] / p[0, :2].sum() / 0.3, p[1, 2] / p[1, :3].sum() / 0.5]
    expected = -(ratios[0] - ratios[1]) / 2
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    (ours,), (theirs,) = torch.autograd.grad(out.loss, logits, retain_graph=True), torch.autograd.grad(expected, logits)
    assert torch.allclose(ours, theirs, atol=1e-14)
    with pytest.raises(LossInputError, match=r"rollout\.top_logprobs_num"):
        policy_loss(dataclasses.replace(inputs, candidate_ids=None), choice, normaliser=1)
