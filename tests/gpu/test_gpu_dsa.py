"""Index selection and attention over the selection on a GPU against the references."""

import pytest
import torch

from k31core.ops.dsa import attention as plain
from k31core.ops.dsa import latent, reference, select_keys, sparse_latent_attention, sparse_mla_attention

pytestmark = pytest.mark.gpu


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def exact_scores(tokens, heads=32, width=128):
    """Small integers: every product and sum is exact in any order, so the selection must be equal, and ties abound."""
    q = torch.randint(-1, 2, (tokens, heads, width), device="cuda").bfloat16()
    k = torch.randint(-1, 2, (tokens, width), device="cuda").bfloat16()
    return q, k, torch.randint(-1, 2, (tokens, heads), device="cuda").bfloat16()


@pytest.mark.parametrize(
    ("lengths", "topk", "rows"),
    [
        ([3000], 2048, None),
        ([700, 1, 0, 2500, 63], 256, None),
        ([5000], 2048, [0, 1, 2047, 2048, 2049, 4999]),
        ([100, 50], 2048, None),
        ([20000], 2048, [2047, 16383, 19999]),
    ],
)
def test_selection_is_exact_with_ties(lengths, topk, rows):
    torch.manual_seed(0)
    tokens = sum(lengths)
    q, k, w = exact_scores(tokens)
    at = None if rows is None else torch.tensor(rows, device="cuda")
    if at is not None:
        q, w = q[at], w[at]
    got = select_keys(q, k, w, cu_seqlens=bounds(lengths), topk=topk, rows=at)
    expected = reference.select_keys(q, k, w, cu_seqlens=bounds(lengths), topk=topk, rows=at, chunk=256)
    assert torch.equal(got, expected)


def test_selection_of_real_scores_and_its_repeatability():
    torch.manual_seed(0)
    q, k = torch.randn(4096, 32, 128, device="cuda").bfloat16(), torch.randn(4096, 128, device="cuda").bfloat16()
    w = torch.randn(4096, 32, device="cuda").bfloat16()
    cu = bounds([4096])
    got = select_keys(q, k, w, cu_seqlens=cu, topk=512)
    assert torch.equal(got, select_keys(q, k, w, cu_seqlens=cu, topk=512))
    # alone or packed behind another sequence, a sequence selects the same keys: the scores have the same bits
    shifted = select_keys(
        torch.cat([q[:1000], q]),
        torch.cat([k[:1000], k]),
        torch.cat([w[:1000], w]),
        cu_seqlens=bounds([1000, 4096]),
        topk=512,
    )[1000:]
    assert torch.equal(torch.where(shifted >= 0, shifted - 1000, shifted), got)
    scores = reference.index_scores(q[3000:3100].double(), k.double(), w[3000:3100].double())
    for i, t in enumerate(range(3000, 3100)):
        chosen, visible = scores[i][got[t].long()], scores[i, : t + 1]
        floor = visible.topk(512).values[-1]
        assert len(set(got[t].tolist())) == 512 and (got[t].diff() > 0).all()
        assert chosen.min() >= floor - 1e-4 * visible.abs().max()


@pytest.mark.parametrize(("heads", "topk", "keys"), [(24, 300, 1000), (96, 64, 500), (5, 33, 100)])
def test_sparse_attention(heads, topk, keys):
    torch.manual_seed(0)
    queries = 200
    q = (torch.randn(queries, heads, 576, device="cuda")).bfloat16().requires_grad_()
    kv = (torch.randn(keys, 576, device="cuda")).bfloat16().requires_grad_()
    ranked = torch.rand(queries, keys, device="cuda").topk(topk, dim=1).indices.sort(dim=1).values.to(torch.int32)
    count = torch.randint(0, topk + 1, (queries, 1), device="cuda")
    indices = torch.where(torch.arange(topk, device="cuda") < count, ranked, -1)
    indices[0] = -1
    weight = torch.randn(queries, heads, 512, device="cuda").bfloat16()
    out = sparse_latent_attention(q, kv, indices, scale=192**-0.5, value_width=512)
    grads = torch.autograd.grad(out, (q, kv), weight)
    high = [x.detach().double().requires_grad_() for x in (q, kv)]
    exact = latent.sparse_latent_attention(*high, indices, scale=192**-0.5, value_width=512)
    expected = torch.autograd.grad(exact, high, weight.double())
    for ours, theirs, tolerance in zip((out, *grads), (exact, *expected), (5e-3, 1e-2, 1e-2)):
        assert torch.isfinite(ours).all()
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


def test_dense_attention():
    torch.manual_seed(0)
    cu = bounds([300, 1, 77])
    q, k = (torch.randn(378, 4, 192, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    v = torch.randn(378, 4, 128, device="cuda").bfloat16().requires_grad_()
    out = sparse_mla_attention(q, k, v, None, cu_seqlens=cu, scale=192**-0.5)
    high = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = plain.sparse_mla_attention(*high, None, cu_seqlens=cu, scale=192**-0.5)
    grads, expected = torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(exact.sum(), high)
    for ours, theirs in zip((out, *grads), (exact, *expected)):
        assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm()
