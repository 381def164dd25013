"""AttnRes mix against a token-by-token loop, its gradient in fp64, and its bits in any batch."""

import math

import pytest
import torch

from k31core.ops.attn_res import attn_res_mix


def by_loops(bank, prefix, norm_weight, proj_weight, eps):
    out = torch.zeros_like(prefix)
    for t in range(prefix.shape[0]):
        rows = [snapshot[t] for snapshot in bank] + [prefix[t]]
        scores = []
        for row in rows:
            rms = math.sqrt(sum(float(x) ** 2 for x in row) / len(row) + eps)
            scores.append(
                sum(float(x) / rms * float(n) * float(p) for x, n, p in zip(row, norm_weight, proj_weight[0]))
            )
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        for row, weight in zip(rows, weights):
            out[t] += row * (weight / sum(weights))
    return out


def inputs(snapshots, tokens, hidden, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(snapshots, tokens, hidden) * 2, make(tokens, hidden), make(hidden) + 1, make(1, hidden)


@pytest.mark.parametrize("snapshots", [0, 1, 3, 8])
def test_equals_loops(snapshots):
    bank, prefix, norm, proj = inputs(snapshots, 5, 6)
    expected = by_loops(bank, prefix, norm, proj, 1e-5)
    torch.testing.assert_close(attn_res_mix(bank, prefix, norm, proj, 1e-5), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attn_res_mix(list(bank), prefix, norm, proj, 1e-5), expected, rtol=1e-12, atol=1e-12)


def test_gradient():
    arguments = [x.requires_grad_() for x in inputs(2, 3, 5)]
    assert torch.autograd.gradcheck(lambda *a: attn_res_mix(*a, 1e-5), arguments)


def test_bf16_keeps_dtype_and_uses_fp32_statistics():
    bank, prefix, norm, proj = inputs(4, 7, 64, torch.bfloat16)
    out = attn_res_mix(bank, prefix, norm, proj, 1e-5)
    exact = attn_res_mix(bank.double(), prefix.double(), norm.double(), proj.double(), 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("hidden", [64, 30])
def test_a_token_has_the_same_bits_in_any_batch(hidden):
    bank, prefix, norm, proj = inputs(3, 9, hidden, torch.float32)
    full = attn_res_mix(bank, prefix, norm, proj, 1e-5)
    for count in (1, 2, 5):
        assert torch.equal(attn_res_mix(bank[:, :count], prefix[:count], norm, proj, 1e-5), full[:count])
