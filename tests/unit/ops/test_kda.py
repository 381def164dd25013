"""KDA: the chunked form against the token loop, the token loop against the matrix formula, bits in any batch."""

import pytest
import torch

from k31core.ops.kda import kda_chunk, kda_gate, kda_gated, kda_recurrent, kda_step, l2norm


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(tokens, heads, width, values, dtype=torch.float64, seed=0, floor=-5.0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = l2norm(make(tokens, heads, width)), l2norm(make(tokens, heads, width))
    decay = floor * torch.sigmoid(3 * make(tokens, heads, width))
    beta = torch.sigmoid(make(tokens, heads))
    return tuple(x.to(dtype) for x in (q, k, make(tokens, heads, values), decay, beta))


def by_matrices(q, k, v, g, beta, cu_seqlens):
    """S <- (I - beta k k^T) diag(e^g) S + beta k v^T with real matrices, one head and token at a time."""
    _, heads, width = q.shape
    out = torch.zeros_like(v)
    finals = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        state = torch.zeros(heads, width, v.shape[2], dtype=v.dtype)
        for t in range(start, end):
            for h in range(heads):
                key = k[t, h][:, None]
                transition = torch.eye(width, dtype=v.dtype) - beta[t, h] * key @ key.T
                state[h] = transition @ torch.diag(g[t, h].exp()) @ state[h] + beta[t, h] * key @ v[t, h][None]
                out[t, h] = state[h].T @ (q[t, h] / width**0.5)
        finals.append(state)
    return out, torch.stack(finals)


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_equals_the_matrix_formula(form):
    arguments = inputs(41, 2, 6, 5)
    cu = bounds([17, 1, 0, 23])
    expected, expected_state = by_matrices(*arguments, cu)
    out, state = form(*arguments, cu)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [[1], [16], [33], [64, 5, 1, 16, 50], [3, 0, 40]])
@pytest.mark.parametrize("initial", [False, True])
def test_chunked_equals_recurrent_in_value_and_gradient(lengths, initial):
    tokens = sum(lengths)
    cu = bounds(lengths)
    leaves = [x.requires_grad_() for x in inputs(tokens, 2, 8, 4, seed=tokens)]
    state = torch.randn(len(lengths), 2, 8, 4, dtype=torch.float64, requires_grad=True) if initial else None
    results = []
    for form in (kda_recurrent, kda_chunk):
        out, final = form(*leaves, cu, state)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        loss = (out * weights).sum() + (final * final).sum()
        wanted = [*leaves, *([state] if initial else [])]
        results.append((out, final, *torch.autograd.grad(loss, wanted)))
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_gradcheck_of_the_chunked_form():
    leaves = [x.requires_grad_() for x in inputs(19, 1, 3, 2, seed=5)]
    assert torch.autograd.gradcheck(lambda *a: kda_chunk(*a, bounds([18, 1])), leaves)


def test_a_decay_below_the_split_floor_takes_the_other_form_and_agrees():
    arguments = inputs(40, 2, 4, 3, floor=-30.0)
    assert float(arguments[3].min()) < -20
    leaves = [x.requires_grad_() for x in arguments]
    results = []
    for form in (kda_recurrent, kda_chunk):
        out, _ = form(*leaves, bounds([40]))
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_strongest_decay_stays_finite_in_fp32():
    q, k, v, g, beta = inputs(48, 1, 16, 16, torch.float32)
    g = torch.full_like(g, -5.0).requires_grad_()  # a cumulative -240 in 48 tokens
    out, state = kda_chunk(q, k, v, g, beta, bounds([48]))
    out.sum().backward()
    expected, _ = kda_recurrent(*(x.double() for x in (q, k, v, g, beta)), bounds([48]))
    assert torch.isfinite(out).all() and torch.isfinite(state).all() and torch.isfinite(g.grad).all()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_equal_keys_and_full_beta_stay_accurate_in_fp32():
    q, k, v, g, beta = inputs(64, 1, 8, 8, torch.float32, floor=-1e-3)
    k, beta = k[:1].expand_as(k), torch.ones_like(beta)
    out, _ = kda_chunk(q, k, v, g, beta, bounds([64]))
    expected, _ = kda_recurrent(*(x.double() for x in (q, k, v, g, beta)), bounds([64]))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_chunked_sequence_has_the_same_bits_alone_and_packed():
    lengths = [40, 7, 16, 33]
    cu = bounds(lengths)
    arguments = inputs(sum(lengths), 2, 32, 32, torch.float32)
    packed, states = kda_chunk(*arguments, cu)
    for s, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist())):
        alone, state = kda_chunk(*(x[start:end] for x in arguments), bounds([end - start]))
        assert torch.equal(alone, packed[start:end])
        assert torch.equal(state[0], states[s])


@pytest.mark.parametrize(("heads", "width"), [(2, 32), (3, 20)])
def test_step_bits_do_not_depend_on_the_batch(heads, width):
    q, k, v, g, beta = inputs(9, heads, width, width, torch.float32)
    state = torch.randn(9, heads, width, width)
    full, new = kda_step(q, k, v, g, beta, state)
    for rows in ([0], [3], [8, 1], [0, 1, 2, 3, 4]):
        part, part_new = kda_step(*(x[rows] for x in (q, k, v, g, beta, state)))
        assert torch.equal(part, full[rows]) and torch.equal(part_new, new[rows])


def test_bf16_inputs_are_computed_in_fp32():
    q, k, v, g, beta = inputs(40, 2, 32, 32, torch.bfloat16)
    out, state = kda_chunk(q, k, v, g.float(), beta, bounds([25, 15]))
    expected, expected_state = kda_recurrent(*(x.double() for x in (q, k, v, g.float(), beta)), bounds([25, 15]))
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-5)


def test_gated_form_is_the_composition():
    q, k, v, f = (torch.randn(20, 2, 6, dtype=torch.float64) for _ in range(4))
    logits, a_log, bias = torch.randn(20, 2).double(), torch.randn(2).double(), torch.randn(12).double()
    cu = bounds([11, 9])
    o, state = kda_gated(q, k, v, f, logits, a_log, bias, lower_bound=-4.0, cu_seqlens=cu)
    g = kda_gate(f, a_log, bias, -4.0)
    expected, expected_state = kda_recurrent(l2norm(q), l2norm(k), v, g, torch.sigmoid(logits), cu)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(state, expected_state)


def test_gate_and_norm_formulas():
    f, A_log, bias = torch.randn(5, 2, 3), torch.randn(2), torch.randn(6)
    gate = kda_gate(f, A_log, bias, -5.0)
    for h in range(2):
        expected = -5.0 / (1 + torch.exp(-A_log[h].exp() * (f[:, h] + bias[3 * h : 3 * h + 3])))
        torch.testing.assert_close(gate[:, h], expected)
    x = torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert torch.equal(l2norm(torch.zeros(2, 3)), torch.zeros(2, 3))
