"""Chosen log-probs and the top-k on a GPU at the model's own sizes against fp32 / fp64 references."""

import pytest
import torch

from k31core.ops.logprobs import kernel, label_and_candidate_logprobs, reference, topk_logprobs

pytestmark = pytest.mark.gpu


def inputs(tokens, hidden, words, candidates, spread=1.0):
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    head = (torch.randn(words, hidden, device="cuda") * (spread / hidden**0.5)).bfloat16()
    ids = torch.rand(tokens, words, device="cuda").topk(candidates, dim=1).indices
    labels = ids[:, 1].clone()
    labels[::3] = torch.randint(0, words, (len(labels[::3]),), device="cuda")
    ids[::5, -1] = -1
    return x, head, labels, ids


@pytest.mark.parametrize(
    ("tokens", "hidden", "words", "valid", "temperature"),
    [(300, 7168, 163840, 163840, 1.0), (33, 256, 20000, 19990, 0.7), (4100, 64, 8192 + 3, 8192, 1.0)],
)
def test_values_and_gradient(tokens, hidden, words, valid, temperature):
    x, head, labels, ids = inputs(tokens, hidden, words, 128, spread=3.0)
    labels, ids = labels.clamp(max=valid - 1), ids.clamp(max=valid - 1)
    x.requires_grad_()
    poison = torch.full((1 << 26,), float("nan"), device="cuda")
    del poison
    label, picked = label_and_candidate_logprobs(x, head, labels, ids, temperature=temperature, valid_vocab=valid)
    exact = x.detach().float().requires_grad_()
    expected = reference.chosen_logprobs(
        exact, head.float(), torch.cat([labels[:, None], ids], 1), temperature=temperature, vocab_start=0,
        valid_vocab=valid,
    )  # fmt: skip
    seen = ids >= 0
    assert (label - expected[:, 0]).abs().max() < 1e-3
    assert (picked - expected[:, 1:])[seen].abs().max() < 1e-3
    assert (picked[~seen] == float("-inf")).all()
    weight = torch.randn(ids.shape, device="cuda")
    (2 * label.sum() + torch.where(seen, picked * weight, 0).sum()).backward()
    (2 * expected[:, 0].sum() + torch.where(seen, expected[:, 1:] * weight, 0).sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad.float() - exact.grad).norm() < 6e-3 * exact.grad.norm()


def test_gradient_reaches_only_chosen_and_probable_words():
    """One token whose distribution is certain: the pull on its own word cancels, so the gradient vanishes."""
    head = torch.eye(64, device="cuda").bfloat16() * 100
    x = torch.eye(64, device="cuda")[:1].bfloat16().requires_grad_()
    label, _ = label_and_candidate_logprobs(
        x, head, torch.zeros(1, dtype=torch.int64, device="cuda"), None, temperature=1.0
    )
    label.sum().backward()
    assert label.abs().max() < 1e-6 and x.grad.abs().max() < 1e-6


def test_memory_at_8192_tokens():
    x, head, labels, ids = inputs(8192, 7168, 163840, 8)
    x.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    label, picked = label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0)
    forward = torch.cuda.max_memory_allocated() - before
    (label.sum() + picked[:, 0].sum()).backward()
    backward = torch.cuda.max_memory_allocated() - before
    print(f"transient at 8192 tokens: forward {forward / 2**30:.3f} GiB, backward {backward / 2**30:.3f} GiB")
    assert forward < 0.5 * 2**30 and backward < 0.5 * 2**30
    assert kernel.TOKENS <= 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "words", "k"), [(5, 163840, 128), (3, 1000, 20), (2, 70000, 1), (4, 163840, 200), (1, 64, 64)]
)
def test_topk(dtype, rows, words, k):
    torch.manual_seed(0)
    logits = (torch.randn(rows, words, device="cuda") * 3).to(dtype)
    logits[0] = torch.randint(-2, 3, (words,), device="cuda")  # ties everywhere
    logits[-1, : words // 2] = float("-inf")
    ids, logps = topk_logprobs(logits, k)
    expected, expected_logps = reference.topk_logprobs(logits, k)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(logps, expected_logps, rtol=1e-5, atol=1e-5)
