"""Score centering against known answers, a full-vocabulary float64 reference, and the properties of spec section 2."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k31core.ops.logprobs import label_and_candidate_logprobs
from k31core.rl.candidates import CandidateMode
from k31core.rl.loss_records import LossInputError
from k31core.rl.score_centering import Weighting, centering, score_centering_loss
from tests.unit.rl.vocabulary import inputs_from_logits, reference_loss

CASES = json.loads((Path(__file__).parents[2] / "cases" / "score_centering.json").read_text())
SELECTED, SUPPORT = CandidateMode.SELECTED, CandidateMode.SUPPORT


def run(logits, q, heads, tokens, advantages, weighting="none", mode=SELECTED, mask=None, normaliser=1.0):
    inputs = inputs_from_logits(logits, q, heads, tokens, advantages, mask)
    return score_centering_loss(inputs, weighting=Weighting(weighting), mode=mode, normaliser=normaliser)


def random_case(seed, vocab=12, head=5, rows=3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 1.5
    q = torch.softmax(logits + torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 0.6, -1)
    heads = [row.argsort(descending=True)[:head].tolist() for row in q]
    tokens = torch.multinomial(q, 1, generator=generator)[:, 0].tolist()
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64).tolist()
    return logits.requires_grad_(), q, heads, tokens, advantages


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-{c['mode']}-{c['token']}")
def test_known_answers(case, dtype, tolerance):
    logits = torch.tensor([case["p"]], dtype=dtype).log().requires_grad_()
    q = torch.tensor([case["q"]], dtype=dtype)
    inputs = inputs_from_logits(logits, q, [case["head"]], [case["token"]], [case["advantage"]])
    out = score_centering_loss(inputs, weighting=Weighting(case["mode"]), mode=SELECTED, normaliser=1.0)
    out.loss.backward()
    pieces = centering(
        inputs.candidate_logprobs,
        inputs.sampler_candidate_logprobs,
        inputs.logprobs,
        inputs.sampler_logprobs,
        inputs.candidate_ids >= 0,
        Weighting(case["mode"]),
    )
    close = {"rel": tolerance, "abs": tolerance}
    assert out.loss.item() == pytest.approx(case["loss"], **close)
    assert logits.grad[0].tolist() == pytest.approx(case["grad_logits"], **close)
    assert float(pieces.rho) == pytest.approx(case["rho"], **close)
    assert float(pieces.alpha) == pytest.approx(case["alpha"], **close)
    assert float(pieces.weight) == pytest.approx(case["weight"], **close)
    assert pieces.coef[0].tolist() == pytest.approx(case["coef"], **close)


def test_worked_case_of_the_specification():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log().requires_grad_()
    out = run(logits, [[0.4, 0.35, 0.05, 0.2]], [[0, 1]], [3], [1.0])
    out.loss.backward()
    assert out.loss.item() == pytest.approx(3.181789709288127, abs=1e-14)
    assert logits.grad[0].tolist() == pytest.approx([0.4, 0.35, 0.1875, -0.9375], abs=1e-14)


@pytest.mark.parametrize("weighting", ["none", "tis", "mis"])
@pytest.mark.parametrize("support", [False, True])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), head=st.integers(1, 12))
def test_value_and_gradient_equal_the_full_vocabulary_reference(weighting, support, seed, head):
    logits, q, heads, tokens, advantages = random_case(seed, head=head)
    if support:
        # What filtered sampling really does: q lives on the support only, and the token is drawn from it.
        inside = torch.zeros_like(q).scatter_(1, torch.tensor(heads), 1.0)
        q = q * inside / (q * inside).sum(-1, keepdim=True)
        tokens = [h[seed % len(h)] for h in heads]
    mode = SUPPORT if support else SELECTED
    out = run(logits, q, heads, tokens, advantages, weighting, mode, normaliser=7.0)
    out.loss.backward()
    expected = [
        reference_loss(logits[i].detach(), q[i].tolist(), heads[i], tokens[i], advantages[i], weighting, support)
        for i in range(len(tokens))
    ]
    assert out.loss.item() == pytest.approx(sum(e[0] for e in expected) / 7.0, rel=1e-9, abs=1e-9)
    for i, (_, grad) in enumerate(expected):
        assert logits.grad[i].tolist() == pytest.approx([g / 7.0 for g in grad], rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("weighting", ["none", "tis", "mis"])
def test_gradient_equals_finite_differences_of_the_loss_with_frozen_coefficients(weighting):
    logits, q, heads, tokens, advantages = random_case(5)
    inputs = inputs_from_logits(logits, q, heads, tokens, advantages)
    frozen = centering(
        inputs.candidate_logprobs,
        inputs.sampler_candidate_logprobs,
        inputs.logprobs,
        inputs.sampler_logprobs,
        inputs.candidate_ids >= 0,
        Weighting(weighting),
    )

    def value(x):
        log_p = torch.log_softmax(x, -1)
        label = log_p.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        head = (frozen.coef * log_p.gather(1, torch.tensor(heads))).sum(-1)
        return float((-torch.tensor(advantages) * (frozen.weight * label - head)).sum())

    run(logits, q, heads, tokens, advantages, weighting).loss.backward()
    base, step = logits.detach(), 1e-6
    for index in [(0, 0), (0, 7), (1, 3), (2, 11)]:
        nudge = torch.zeros_like(base)
        nudge[index] = step
        slope = (value(base + nudge) - value(base - nudge)) / (2 * step)
        assert float(logits.grad[index]) == pytest.approx(slope, abs=1e-8)


def test_whole_vocabulary_as_head_has_zero_mean_gradient_under_the_sampler():
    logits, q, _, _, _ = random_case(1, rows=1)
    vocab = q.shape[1]
    total = torch.zeros(vocab, dtype=torch.float64)
    for token in range(vocab):
        (grad,) = torch.autograd.grad(run(logits, q, [list(range(vocab))], [token], [1.0]).loss, logits)
        total += q[0, token] * grad[0]
    assert total.abs().max() < 1e-12
    uncentred = sum(q[0, t] * (torch.softmax(logits[0], -1) - torch.eye(vocab)[t]) for t in range(vocab))
    assert uncentred.abs().max() > 1e-2  # without centering the mean would not vanish: the test can fail


def test_matched_sampler_gives_the_plain_policy_gradient():
    logits, _, _, tokens, advantages = random_case(2)
    p = torch.softmax(logits.detach(), -1)
    heads = [row.argsort(descending=True)[:4].tolist() for row in p]
    for weighting in ("none", "tis", "mis"):
        out = run(logits, p, heads, tokens, advantages, weighting)
        expected = -sum(a * float(p[i, t].log()) for i, (t, a) in enumerate(zip(tokens, advantages)))
        assert out.loss.item() == pytest.approx(expected, rel=1e-9)


def test_untruncated_importance_weights_need_no_centering():
    logits, q, heads, tokens, advantages = random_case(3)
    q = torch.softmax(logits.detach() + 0.2 * torch.sin(torch.arange(12.0, dtype=torch.float64)), -1)
    inputs = inputs_from_logits(logits, q, heads, tokens, advantages)
    pieces = centering(
        inputs.candidate_logprobs,
        inputs.sampler_candidate_logprobs,
        inputs.logprobs,
        inputs.sampler_logprobs,
        inputs.candidate_ids >= 0,
        Weighting.TIS,
    )
    assert pieces.coef.abs().max() < 1e-12


def test_support_mode_has_unit_tail_ratio_in_float32():
    logits, q, heads, _, _ = random_case(4, vocab=200, head=128, rows=4)
    inside = torch.zeros_like(q).scatter_(1, torch.tensor(heads), 1.0)
    q = (q * inside / (q * inside).sum(-1, keepdim=True)).float()
    out = run(logits.detach().float(), q, heads, [h[0] for h in heads], [1.0] * 4, mode=SUPPORT)
    assert float(out.sums["train/sc_tail_ratio"]) / 4 == pytest.approx(1.0, abs=1e-2)
    assert float(out.sums["train/sc_train_head_mass"]) / 4 == pytest.approx(1.0, abs=1e-6)


def test_a_zero_coefficient_removes_an_infinite_log_probability():
    logits = torch.tensor([[0.0, 0.0, float("-inf"), -1.0]], requires_grad=True)
    q = [[0.4, 0.4, 0.1, 0.1]]
    # tis: p = 0 gives f = 0 and coefficient 0. `none` keeps the weight q, so the loss is really infinite: an error.
    out = run(logits, q, [[0, 2]], [1], [1.0], "tis")
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(logits.grad).all()
    with pytest.raises(LossInputError, match=r"sample 3-0-1, response position 7: the loss is -?inf"):
        run(logits, q, [[0, 2]], [1], [1.0], "none")


def test_zero_advantage_is_zero_whatever_the_log_probability():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    out = run(logits, [[0.4, 0.4, 0.2]], [[0, 2]], [1], [0.0], "none")
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("field", ["sampler_logprobs", "sampler_candidate_logprobs", "candidate_logprobs", "logprobs"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_head_on_an_active_token_names_sample_and_position(field, value):
    logits, q, heads, tokens, advantages = random_case(6)
    inputs = inputs_from_logits(logits.detach(), q, heads, tokens, advantages)
    broken = getattr(inputs, field).clone()
    broken[1] = value
    inputs = dataclasses.replace(inputs, **{field: broken})
    call = {"weighting": Weighting.NONE, "mode": SELECTED, "normaliser": 1.0}
    with pytest.raises(LossInputError, match="sample 3-0-2, response position 8"):
        score_centering_loss(inputs, **call)
    masked = dataclasses.replace(inputs, mask=torch.tensor([True, False, True]))
    assert torch.isfinite(score_centering_loss(masked, **call).loss)


def test_masked_rows_with_garbage_have_exactly_zero_gradient():
    logits, q, heads, _, advantages = random_case(7)
    poisoned = logits.detach().clone()
    poisoned[1] = float("nan")
    poisoned.requires_grad_()
    for mode in (SELECTED, SUPPORT):
        table = q.clone()
        if mode is SUPPORT:
            inside = torch.zeros_like(q).scatter_(1, torch.tensor(heads), 1.0)
            table = q * inside / (q * inside).sum(-1, keepdim=True)
        drawn = [h[0] for h in heads]
        inputs = inputs_from_logits(poisoned, table, heads, drawn, advantages, [True, False, True])
        leaves = [inputs.logprobs.detach().requires_grad_(), inputs.candidate_logprobs.detach().requires_grad_()]
        inputs = dataclasses.replace(inputs, logprobs=leaves[0], candidate_logprobs=leaves[1])
        out = score_centering_loss(inputs, weighting=Weighting.NONE, mode=mode, normaliser=2.0)
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert (leaves[0].grad[1] == 0).all()
        assert (leaves[1].grad[1] == 0).all()
        assert leaves[0].grad[0] != 0


@pytest.mark.parametrize("fault,message", [("partial", "recorded share"), ("outside", "the drawn token")])
def test_support_mode_needs_the_whole_support(fault, message):
    q = [[0.6, 0.4, 0.0, 0.0]] if fault == "outside" else [[0.5, 0.3, 0.1, 0.1]]
    token = 2 if fault == "outside" else 0
    q_row = torch.tensor(q, dtype=torch.float64)
    inputs = inputs_from_logits(torch.zeros(1, 4, dtype=torch.float64), q_row, [[0, 1]], [token], [1.0])
    inputs = dataclasses.replace(inputs, sampler_logprobs=torch.tensor([-1.0], dtype=torch.float64))
    with pytest.raises(LossInputError, match=message):
        score_centering_loss(inputs, weighting=Weighting.NONE, mode=SUPPORT, normaliser=1.0)


def test_repeated_candidates_are_no_distribution():
    logits = torch.zeros(1, 3, dtype=torch.float64)
    with pytest.raises(LossInputError, match="head mass"):
        run(logits, [[0.6, 0.3, 0.1]], [[0, 0]], [0], [1.0])


def test_packing_order_and_masked_samples_change_nothing():
    logits, q, heads, tokens, advantages = random_case(8, rows=6)

    def split(parts):
        total, grads = 0.0, torch.zeros_like(logits)
        for rows in parts:
            part = [x[rows] if torch.is_tensor(x) else [x[i] for i in rows] for x in (q, heads, tokens, advantages)]
            loss = run(logits[rows], *part, normaliser=6.0).loss
            (grad,) = torch.autograd.grad(loss, logits)
            total, grads = total + loss.item(), grads + grad
        return total, grads

    whole, grad = split([[0, 1, 2, 3, 4, 5]])
    for parts in ([[0], [1, 2], [3, 4, 5]], [[5, 3, 1], [4, 2, 0]]):
        other, other_grad = split(parts)
        assert other == pytest.approx(whole, rel=1e-12)
        assert torch.allclose(grad, other_grad, rtol=1e-12, atol=1e-14)


def test_padded_vocabulary_has_exactly_zero_gradient_through_the_output_head():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 8, generator=generator).requires_grad_()
    head = torch.randn(16, 8, generator=generator).requires_grad_()
    _, q, heads, tokens, advantages = random_case(9)
    inputs = inputs_from_logits(torch.zeros(3, 12, dtype=torch.float32), q.float(), heads, tokens, advantages)
    label, candidates = label_and_candidate_logprobs(
        hidden, head, inputs.label_ids, inputs.candidate_ids, temperature=1.0, valid_vocab=12, chunk=2
    )
    inputs = dataclasses.replace(inputs, logprobs=label, candidate_logprobs=candidates)
    score_centering_loss(inputs, weighting=Weighting.NONE, mode=SELECTED, normaliser=3.0).loss.backward()
    assert (head.grad[12:] == 0).all()
    assert (head.grad[:12].abs().sum(1) > 0).all()


def test_half_precision_inputs_are_computed_in_float32():
    logits, q, heads, tokens, advantages = random_case(10)
    inputs = inputs_from_logits(logits.detach(), q, heads, tokens, advantages)
    half = dataclasses.replace(
        inputs,
        **{
            name: getattr(inputs, name).bfloat16()
            for name in ("logprobs", "candidate_logprobs", "sampler_logprobs", "sampler_candidate_logprobs")
        },
    )
    out = score_centering_loss(half, weighting=Weighting.TIS, mode=SELECTED, normaliser=3.0)
    assert out.loss.dtype == torch.float32
    full = score_centering_loss(inputs, weighting=Weighting.TIS, mode=SELECTED, normaliser=3.0)
    assert out.loss.item() == pytest.approx(full.loss.item(), abs=0.05)
