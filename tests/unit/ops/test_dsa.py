"""DSA against loops: scores, ties, packed selection, attention over the selection, decoding bits in any batch."""

import pytest
import torch

from k31core.ops.dsa import (
    absorb_query,
    causal_ranges,
    expand_value,
    index_scores,
    index_scores_step,
    mla_latent_attention,
    reference,
    select_keys,
    select_topk,
    sparse_latent_attention,
    sparse_mla_attention,
)


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def score_loops(q, k, w):
    out = torch.zeros(q.shape[0], k.shape[0], dtype=q.dtype)
    for t in range(q.shape[0]):
        for s in range(k.shape[0]):
            for h in range(q.shape[1]):
                out[t, s] += w[t, h] * max(0.0, float(q[t, h] @ k[s])) * q.shape[2] ** -0.5 * q.shape[1] ** -0.5
    return out


def choose(scores, start, end, topk):
    """Python's own sort: best score first, the larger index among equals."""
    ranked = sorted(range(start, end), key=lambda s: (-scores[s], -s))
    chosen = sorted(ranked[:topk])
    return chosen + [-1] * (topk - len(chosen))


def test_scores_equal_loops():
    q, k, w = torch.randn(4, 3, 5).double(), torch.randn(6, 5).double(), torch.randn(4, 3).double()
    torch.testing.assert_close(index_scores(q, k, w), score_loops(q, k, w))
    keys = k[None].repeat(4, 1, 1)
    torch.testing.assert_close(index_scores_step(q, keys, w), score_loops(q, k, w))


@pytest.mark.parametrize("topk", [1, 3, 8, 40])
def test_selection_equals_a_python_sort_with_many_ties(topk):
    scores = torch.randint(-2, 3, (30, 25)).float()
    scores[scores == 0] *= torch.where(torch.rand(int((scores == 0).sum())) < 0.5, -1.0, 1.0)  # both signed zeros
    start = torch.randint(0, 20, (30,))
    end = torch.maximum(start, torch.randint(0, 26, (30,)))
    got = select_topk(scores, topk, start, end)
    assert got.dtype == torch.int32
    for t in range(30):
        assert got[t].tolist() == choose(scores[t].tolist(), int(start[t]), int(end[t]), topk)


@pytest.mark.parametrize("rows", [None, [0, 5, 6, 20, 24]])
def test_packed_selection_equals_loops(rows):
    lengths = [6, 1, 0, 18]
    cu = bounds(lengths)
    q, k, w = torch.randn(25, 2, 4).double(), torch.randn(25, 4).double(), torch.randn(25, 2).double()
    k[9] = k[14] = k[20]  # equal keys tie exactly
    at = None if rows is None else torch.tensor(rows)
    queries = torch.arange(25) if rows is None else at
    got = select_keys(q[queries], k, w[queries], cu_seqlens=cu, topk=4, rows=at)
    small = reference.select_keys(q[queries], k, w[queries], cu_seqlens=cu, topk=4, rows=at, chunk=7)
    assert torch.equal(got, small)
    scores = score_loops(q, k, w)
    for i, t in enumerate(queries.tolist()):
        start = max(int(c) for c in cu if c <= t)
        assert got[i].tolist() == choose(scores[t].tolist(), start, t + 1, 4)


def attention_loops(q, k, v, allowed, scale):
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=v.dtype)
    for t, keys in enumerate(allowed):
        for h in range(q.shape[1]):
            weights = torch.softmax(torch.stack([q[t, h] @ k[s, h] for s in keys]) * scale, 0)
            for weight, s in zip(weights, keys):
                out[t, h] += weight * v[s, h]
    return out


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("rows", [None, [0, 3, 10, 19]])
def test_attention_equals_loops(selected, rows):
    lengths = [9, 1, 0, 10]
    cu = bounds(lengths)
    q, k = torch.randn(20, 2, 5).double(), torch.randn(20, 2, 5).double()
    v = torch.randn(20, 2, 3).double()
    start, end = causal_ranges(cu)
    at = None if rows is None else torch.tensor(rows)
    queries = torch.arange(20) if rows is None else at
    indices = select_topk(torch.randn(20, 20), 4, start, end)
    allowed = [
        [s for s in indices[t].tolist() if s >= 0] if selected else list(range(int(start[t]), t + 1))
        for t in queries.tolist()
    ]
    got = sparse_mla_attention(
        q[queries], k, v, indices[queries] if selected else None, cu_seqlens=cu, scale=0.3, rows=at
    )
    torch.testing.assert_close(got, attention_loops(q[queries], k, v, allowed, 0.3))


def test_bf16_attention_has_an_fp32_softmax():
    cu = bounds([30, 20])
    q, k, v = (torch.randn(50, 2, width).bfloat16() for width in (24, 24, 16))
    out = sparse_mla_attention(q, k, v, None, cu_seqlens=cu, scale=0.2)
    exact = sparse_mla_attention(q.double(), k.double(), v.double(), None, cu_seqlens=cu, scale=0.2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


def test_attention_gradient():
    cu = bounds([5, 2])
    make = lambda width: torch.randn(7, 2, width, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v = make(3), make(3), make(2)
    indices = select_topk(torch.randn(7, 7), 3, *causal_ranges(cu))
    for chosen in (None, indices):
        function = lambda *a, c=chosen: sparse_mla_attention(*a, c, cu_seqlens=cu, scale=0.5)  # noqa: E731
        assert torch.autograd.gradcheck(function, (q, k, v))


def test_absorbed_form_equals_the_plain_form():
    """kv_b's halves moved from the keys and values to the query and the output change nothing."""
    tokens, heads, nope, extra, value, width = 20, 3, 6, 4, 5, 8
    cu = bounds([13, 7])
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, latent, shared = make(tokens, heads, nope + extra), make(tokens, width), make(tokens, extra)
    key_half, value_half = make(heads, nope, width), make(heads, value, width)
    indices = select_topk(torch.randn(tokens, tokens), 4, *causal_ranges(cu))
    keys = torch.cat([torch.einsum("tl,hnl->thn", latent, key_half), shared[:, None].expand(-1, heads, -1)], -1)
    values = torch.einsum("tl,hvl->thv", latent, value_half)
    plain = sparse_mla_attention(q, keys, values, indices, cu_seqlens=cu, scale=0.4)
    rows = torch.cat([latent, shared], -1)
    absorbed = sparse_latent_attention(absorb_query(q, key_half), rows, indices, scale=0.4, value_width=width)
    absorbed = expand_value(absorbed, value_half)
    torch.testing.assert_close(absorbed, plain)
    leaves = (q, latent, shared, key_half, value_half)
    for ours, expected in zip(
        torch.autograd.grad(absorbed.square().sum(), leaves), torch.autograd.grad(plain.square().sum(), leaves)
    ):
        torch.testing.assert_close(ours, expected)
    empty = sparse_latent_attention(absorb_query(q, key_half), rows, indices * 0 - 1, scale=0.4, value_width=width)
    assert torch.equal(empty, torch.zeros_like(empty))


def test_a_sequence_has_the_same_bits_alone_and_packed():
    cu = bounds([20, 3, 37])
    q, k, v = torch.randn(60, 4, 24), torch.randn(60, 4, 24), torch.randn(60, 4, 16)
    packed = sparse_mla_attention(q, k, v, None, cu_seqlens=cu, scale=0.2)
    for start, end in ((0, 20), (20, 23), (23, 60)):
        at = slice(start, end)
        alone = sparse_mla_attention(q[at], k[at], v[at], None, cu_seqlens=bounds([end - start]), scale=0.2)
        assert torch.equal(alone, packed[at])


def latent_inputs(lengths, slots, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    rows = len(lengths)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(rows, 4, 32), make(rows, 4, 8), make(rows, slots, 32), make(rows, slots, 8), torch.tensor(lengths)


def test_latent_attention_equals_loops_and_ignores_unused_slots():
    q, qx, latent, extra, lengths = latent_inputs([1, 70, 130], 130, torch.float64)
    for row, length in enumerate(lengths.tolist()):
        latent[row, length:] = float("nan")
    got = mla_latent_attention(q, qx, latent, extra, lengths, scale=0.2)
    for row, length in enumerate(lengths.tolist()):
        keys = torch.cat([latent[row, :length], extra[row, :length]], -1)
        weights = torch.softmax(torch.cat([q[row], qx[row]], -1) @ keys.T * 0.2, -1)
        torch.testing.assert_close(got[row], weights @ latent[row, :length])


def test_latent_attention_over_a_selection():
    q, qx, latent, extra, lengths = latent_inputs([90, 100], 100, torch.float64)
    indices = torch.tensor([[3, 40, 77, -1], [0, 1, 98, 99]], dtype=torch.int32)
    got = mla_latent_attention(q, qx, latent, extra, lengths, scale=0.2, indices=indices)
    for row in range(2):
        at = [i for i in indices[row].tolist() if i >= 0]
        keys = torch.cat([latent[row, at], extra[row, at]], -1)
        weights = torch.softmax(torch.cat([q[row], qx[row]], -1) @ keys.T * 0.2, -1)
        torch.testing.assert_close(got[row], weights @ latent[row, at])


def test_decoding_bits_do_not_depend_on_the_batch():
    lengths = [5, 64, 65, 200, 17, 130, 1, 40, 63]
    q, qx, latent, extra, used = latent_inputs(lengths, 200)
    iq, ik, iw = torch.randn(9, 4, 16), torch.randn(9, 200, 16), torch.randn(9, 4)
    full = mla_latent_attention(q, qx, latent, extra, used, scale=0.2)
    scores = index_scores_step(iq, ik, iw)
    for rows in ([0], [3], [1, 6], [0, 2, 4], [8, 7, 6, 5]):
        slots = max(lengths[r] for r in rows)
        part = mla_latent_attention(q[rows], qx[rows], latent[rows, :slots], extra[rows, :slots], used[rows], scale=0.2)
        assert torch.equal(part, full[rows])
        part = index_scores_step(iq[rows], ik[rows, :slots], iw[rows])
        assert torch.equal(part, scores[rows, :slots])


def test_naming_every_slot_equals_naming_none_to_the_bit():
    q, qx, latent, extra, lengths = latent_inputs([5, 64, 90], 90)
    every = torch.arange(128)[None].expand(3, -1)
    indices = torch.where(every < lengths[:, None], every, -1).to(torch.int32)
    dense = mla_latent_attention(q, qx, latent, extra, lengths, scale=0.2)
    assert torch.equal(mla_latent_attention(q, qx, latent, extra, lengths, scale=0.2, indices=indices), dense)
