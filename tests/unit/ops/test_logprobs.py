"""Chosen log-probs against a full log-softmax, in value and gradient, alone and split over two ranks; the top-k's
ties."""

import pytest
import torch

from k31core.ops.logprobs import WordIdError, label_and_candidate_logprobs, topk_logprobs


def inputs(tokens=7, hidden=5, words=23, candidates=4, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g, dtype=torch.float64).to(dtype)
    head = torch.randn(words, hidden, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, words, (tokens,), generator=g)
    ids = torch.stack([torch.randperm(words, generator=g)[:candidates] for _ in range(tokens)])
    ids[::3, -1] = -1
    return x, head, labels, ids


def full(x, head, labels, ids, temperature, valid):
    logits = (x @ head.T) / temperature
    logits = torch.cat([logits[:, :valid], torch.full_like(logits[:, valid:], float("-inf"))], dim=1)
    logps = torch.log_softmax(logits, -1)
    picked = torch.gather(logps, 1, ids.clamp(min=0)).masked_fill(ids < 0, float("-inf"))
    return torch.gather(logps, 1, labels[:, None])[:, 0], picked


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [2, 512])
def test_equals_log_softmax_in_value_and_gradient(temperature, chunk):
    x, head, labels, ids = inputs()
    x.requires_grad_(), head.requires_grad_()
    outcomes = []
    for function in (
        lambda: full(x, head, labels, ids, temperature, 23),
        lambda: label_and_candidate_logprobs(x, head, labels, ids, temperature=temperature, chunk=chunk),
    ):
        label, picked = function()
        weights = torch.linspace(-1, 2, picked.numel(), dtype=torch.float64).view(picked.shape)
        loss = (label * torch.arange(7)).sum() + torch.where(ids >= 0, picked * weights, 0).sum()
        outcomes.append((label, picked, *torch.autograd.grad(loss, (x, head))))
    for ours, expected in zip(outcomes[1], outcomes[0]):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_padded_words_get_exactly_nothing():
    x, head, labels, ids = inputs(words=23)
    head[20:] = 1e4  # would win every softmax
    x.requires_grad_(), head.requires_grad_()
    labels, ids = labels % 20, torch.where(ids >= 20, 3, ids)
    label, picked = label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0, valid_vocab=20)
    expected, expected_picked = full(x, head, labels, ids, 1.0, 20)
    torch.testing.assert_close(label, expected)
    torch.testing.assert_close(picked, expected_picked)
    gradient = torch.autograd.grad(label.sum() + picked[ids >= 0].sum(), head)[0]
    assert torch.equal(gradient[20:], torch.zeros_like(gradient[20:])) and gradient[:20].abs().min() > 0


def test_padding_ids_are_minus_infinity_without_gradient():
    x, head, labels, ids = inputs()
    x.requires_grad_()
    labels[2] = -1
    ids[2] = -1
    label, picked = label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0)
    assert label[2] == float("-inf") and (picked[2] == float("-inf")).all()
    (label.sum() + picked.sum()).backward()
    assert torch.equal(x.grad[2], torch.zeros_like(x.grad[2])) and torch.isfinite(x.grad).all()
    assert x.grad[[0, 1, 3]].abs().sum(-1).min() > 0


def test_frozen_head_gets_no_gradient_and_no_candidates_is_allowed():
    x, head, labels, _ = inputs()
    x.requires_grad_()
    label, none = label_and_candidate_logprobs(x, head, labels, None, temperature=1.0)
    label.sum().backward()
    assert none is None and head.grad is None and x.grad is not None


@pytest.mark.parametrize("bad", [23, -2, 10**9])
def test_foreign_ids_are_refused_by_place(bad):
    x, head, labels, ids = inputs()
    ids[3, 1] = bad
    with pytest.raises(WordIdError, match=rf"candidates\[3, 1\] is {bad}.*0 to 22"):
        label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0)


def test_group_needs_the_word_count():
    x, head, labels, ids = inputs()
    with pytest.raises(ValueError, match="valid_vocab"):
        label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0, group=object())


def _rank(rank, port, queue):
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, head, labels, ids = inputs(words=24)
    x.requires_grad_()
    labels, ids = labels % 21, torch.where(ids >= 21, 3, ids)
    part = head[rank * 12 : rank * 12 + 12]
    outcome = label_and_candidate_logprobs(
        x, part, labels, ids, temperature=0.8, vocab_start=rank * 12, valid_vocab=21, group=dist.group.WORLD, chunk=3
    )
    (outcome[0].sum() + outcome[1][ids >= 0].square().sum()).backward()
    queue.put((rank, outcome[0].tolist(), outcome[1].tolist(), x.grad.tolist()))
    dist.destroy_process_group()


def test_two_ranks_equal_one():
    import torch.multiprocessing as mp

    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, port, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    outcomes = [queue.get() for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    x, head, labels, ids = inputs(words=24)
    x.requires_grad_()
    labels, ids = labels % 21, torch.where(ids >= 21, 3, ids)
    label, picked = full(x, head, labels, ids, 0.8, 21)
    (label.sum() + picked[ids >= 0].square().sum()).backward()
    for _, ours_label, ours_picked, gradient in outcomes:
        torch.testing.assert_close(torch.tensor(ours_label, dtype=torch.float64), label)
        torch.testing.assert_close(torch.tensor(ours_picked, dtype=torch.float64), picked)
        torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), x.grad)


def test_bf16_hidden_uses_fp32_logits():
    x, head, labels, ids = inputs(tokens=16, hidden=64, words=300, dtype=torch.bfloat16)
    label, picked = label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0)
    expected, expected_picked = full(x.double(), head.double(), labels, ids, 1.0, 300)
    assert label.dtype == torch.float32
    torch.testing.assert_close(label.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(picked.double(), expected_picked, rtol=0, atol=1e-4)


def test_topk_ties_go_to_the_smaller_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, float("-inf")]])
    ids, logps = topk_logprobs(logits, 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(logps, torch.gather(torch.log_softmax(logits, -1), 1, ids))
