"""Pieces of the embedded engine against independent references, and the same bits for a row in any batch."""

import numpy as np
import pytest
import torch

from k31core.ops.dsa import mla_latent_attention, select_topk
from k31core.ops.kda import kda_step
from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engines.embedded.attention import BLOCK, causal_mask, latent_attention, selected_mask
from k31core.rollout.engines.embedded.output import uniform_draws
from k31core.rollout.engines.embedded.recurrence import delta_step_
from k31core.rollout.engines.embedded.sampler import draw
from k31core.rollout.engines.embedded.scheduler import Scheduler


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_delta_step_equals_the_operator():
    g = generator()
    q, k, v = (torch.nn.functional.normalize(torch.randn(13, 3, 16, generator=g), dim=-1) for _ in range(3))
    decay, beta = -5 * torch.rand(13, 3, 16, generator=g), torch.rand(13, 3, generator=g)
    state = torch.randn(13, 3, 16, 16, generator=g)
    expected, expected_state = kda_step(q, k, v, decay, beta, state)
    for rows in (13, 1, 5):
        own = state[:rows].clone()
        out = delta_step_(q[:rows], k[:rows], v[:rows], decay[:rows], beta[:rows], own)
        assert torch.allclose(out, expected[:rows], atol=1e-5) and torch.allclose(own, expected_state[:rows], atol=1e-5)
        if rows == 13:
            whole, whole_state = out, own
        assert torch.equal(out, whole[:rows]) and torch.equal(own, whole_state[:rows])


@pytest.mark.parametrize("topk", [None, 7])
def test_latent_attention_equals_the_operator_and_a_dense_softmax(topk):
    """Rows of different length, one query each; slots past the length hold large numbers."""
    g = generator(1)
    rows, heads, latent, extra, blocks = 6, 4, 12, 4, 3
    lengths = torch.tensor([1, 63, 64, 65, 130, 192])
    keys = torch.randn(rows, blocks, BLOCK, latent + extra, generator=g)
    query = torch.randn(rows, 1, heads, latent + extra, generator=g)
    flat = keys.flatten(1, 2)
    flat[torch.arange(blocks * BLOCK) >= lengths[:, None]] = 1e4
    visible = causal_mask(lengths[:, None], blocks * BLOCK)
    indices = None
    if topk is not None:
        scores = torch.randn(rows, blocks * BLOCK, generator=g)
        indices = select_topk(scores, topk, torch.zeros(rows, dtype=torch.int64), lengths)
        chosen = torch.zeros(rows, blocks * BLOCK + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(indices >= 0, indices, blocks * BLOCK).long(), True)
        visible = chosen[:, None, :-1]
    out = latent_attention(query, keys, visible, latent=latent, scale=0.3)[:, 0]
    operator = mla_latent_attention(
        query[:, 0, :, :latent],
        query[:, 0, :, latent:],
        flat[..., :latent],
        flat[..., latent:],
        lengths,
        scale=0.3,
        indices=indices,
    )
    scores = torch.einsum("rhw,rsw->rhs", query[:, 0].double(), flat.double()) * 0.3
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    dense = torch.einsum("rhs,rsl->rhl", weights, flat[..., :latent].double())
    assert torch.allclose(out, operator, atol=2e-5)
    assert torch.allclose(out.double(), dense, atol=2e-5)
    for row, length in enumerate(lengths.tolist()):
        used = -(-length // BLOCK)
        alone = latent_attention(
            query[row : row + 1],
            keys[row : row + 1, :used],
            visible[row : row + 1, :, : used * BLOCK],
            latent=latent,
            scale=0.3,
        )
        assert torch.equal(alone[0, 0], out[row])


def test_selection_is_the_exact_top_k_with_ties_to_the_larger_slot():
    """Integer scores, so ties are exact; queries of one row see different lengths."""
    g = generator(2)
    queries, heads, width, topk = 10, 3, 8, 4
    index_keys = torch.randint(-2, 3, (2, 2, BLOCK, width), generator=g).float()
    index_q = torch.randint(-2, 3, (2, queries, heads, width), generator=g).float()
    index_w = torch.randint(-2, 3, (2, queries, heads), generator=g).float()
    ends = torch.arange(1, queries + 1).repeat(2, 1) * 9
    mask = selected_mask(index_q, index_w, index_keys, ends, topk)
    assert mask.shape == (2, queries, 2 * BLOCK)
    products = torch.relu(torch.einsum("gqhd,gsd->gqhs", index_q, index_keys.flatten(1, 2)))
    scores = torch.einsum("gqhs,gqh->gqs", products, index_w)
    for row in range(2):
        for query in range(queries):
            end = int(ends[row, query])
            order = sorted(range(end), key=lambda s: (-scores[row, query, s].item(), -s))[:topk]
            assert sorted(order) == mask[row, query].nonzero().flatten().tolist()


def params(**fields):
    base = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": 4,
        "stop_token_ids": (),
        "seed": 1,
        "top_logprobs_num": 3,
    }
    return SamplingParams(**(base | fields))


def test_draw_inverts_the_cumulative_distribution():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(5, 1)
    drawn = draw(logits, [params()] * 5, np.array([0.0, 0.0999, 0.1001, 0.59, 0.9999]))
    assert drawn.tokens.tolist() == [0, 0, 1, 2, 3]
    assert np.allclose(np.exp(drawn.logprobs), [0.1, 0.1, 0.2, 0.3, 0.4])
    assert drawn.top_ids[0].tolist() == [3, 2, 1] and drawn.counts.tolist() == [3] * 5


def test_words_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 0.25, 0.4999999, 0.5, 0.75, np.nextafter(1.0, 0)):
        assert draw(logits, [params()], np.array([uniform])).tokens[0] in (1, 3)


def test_top_p_keeps_the_word_that_crosses_it_and_top_k_comes_first():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4, 1)
    asked = [params(top_p=0.5), params(top_p=0.51), params(top_k=3, top_p=0.9), params(temperature=2.0)]
    drawn = draw(logits, asked, np.full(4, 0.99))
    assert drawn.counts.tolist() == [1, 2, 3, 4]
    assert drawn.tokens.tolist() == [0, 1, 2, 3]
    assert np.allclose(np.exp(drawn.top_logprobs[2, :3]), np.array([0.5, 0.3, 0.15]) / 0.95)
    hot = np.sqrt([0.5, 0.3, 0.15, 0.05])
    assert np.allclose(np.exp(drawn.top_logprobs[3]), hot / hot.sum())


def test_a_row_is_drawn_alike_in_any_batch():
    """Filtered and greedy neighbours change nothing, nor does the number of rows."""
    logits = torch.randn(64, 97, generator=generator(3))
    uniforms = uniform_draws(5, 64)
    asked = [
        params(top_p=0.8) if i % 3 == 0 else params(temperature=0.0) if i % 3 == 1 else params() for i in range(64)
    ]
    together = draw(logits, asked, uniforms)
    for i in range(64):
        alone = draw(logits[i : i + 1], asked[i : i + 1], uniforms[i : i + 1])
        keep = together.counts[i]
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == together.logprobs[i]
        assert np.array_equal(alone.top_ids[0, :keep], together.top_ids[i, :keep])
        assert np.array_equal(alone.top_logprobs[0, :keep], together.top_logprobs[i, :keep])


def test_uniform_draws_are_a_stream_of_the_seed():
    """A longer request draws the same first numbers; the words are numpy's documented Philox stream."""
    assert np.array_equal(uniform_draws(7, 4), uniform_draws(7, 100)[:4])
    assert not np.array_equal(uniform_draws(7, 4), uniform_draws(8, 4))
    many = uniform_draws(2**63 - 1, 20000)
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.01
    assert np.array_equal(many[:5], np.random.Generator(np.random.Philox(key=2**63 - 1)).random(5))


def queued(name, prompt_length, new):
    return GenerateRequest(name, tuple(range(prompt_length)), params(max_new_tokens=new), 0)


def test_admission_is_in_order_and_within_rows_and_pages():
    """A request that does not fit holds back those behind it; pages come back when it ends."""
    scheduler = Scheduler(max_rows=3, pages=6, page_tokens=64)
    scheduler.waiting.extend([queued("a", 60, 5), queued("b", 100, 100), queued("c", 60, 70), queued("d", 1, 1)])
    admitted = scheduler.admit()
    assert [r.request.request_id for r in admitted] == ["a", "b"]
    assert [len(r.pages) for r in admitted] == [1, 4]
    for running in admitted:
        scheduler.prompts.remove(running)
        scheduler.start(running)
    assert scheduler.admit() == []
    scheduler.finish([admitted[1]])
    assert [r.request.request_id for r in scheduler.admit()] == ["c", "d"]
    pages = [page for r in [*scheduler.rows, *scheduler.prompts] for page in r.pages]
    assert len(set(pages)) == len(pages) == 5 and 0 not in pages


def test_rows_stay_without_holes():
    """Random ends against a plain list: every request's state ends up in the row the scheduler says."""
    rng = np.random.default_rng(0)
    scheduler = Scheduler(max_rows=16, pages=64, page_tokens=64)
    state = [""] * 16
    for turn in range(60):
        scheduler.waiting.extend(queued(f"{turn}-{i}", 5, 5) for i in range(rng.integers(0, 4)))
        for running in scheduler.admit():
            scheduler.prompts.remove(running)
            state[scheduler.start(running)] = running.request.request_id
        rows = list(scheduler.rows)
        done = [rows[i] for i in rng.permutation(len(rows))[: rng.integers(0, len(rows) + 1)]]
        for source, target in scheduler.finish(done):
            assert source >= len(scheduler.rows) > target
            state[target] = state[source]
        assert [r.row for r in scheduler.rows] == list(range(len(scheduler.rows)))
        assert [state[r.row] for r in scheduler.rows] == [r.request.request_id for r in scheduler.rows]
