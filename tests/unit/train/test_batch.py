"""Packing: what must hold for any set of samples, and every rejection by sample id."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k31core.parallel.mesh import Axis, Mesh
from k31core.train.batch import loss_token_count, make_microbatches, own_chunk, pack, pack_plan
from k31core.train.samples import RoutingError, SampleError, check_sample
from tests.unit.train.random_samples import limits, random_sample

LIMITS = limits()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 200), st.integers(1, 4))
def test_plan_places_every_sample_once_within_the_limit(lengths, capacity, multiple):
    plan = pack_plan(lengths, capacity, multiple_of=multiple)
    assert sorted(i for members in plan for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in plan)
    assert len(plan) % multiple == 0
    assert all(members == sorted(members) for members in plan)
    assert plan == pack_plan(lengths, capacity, multiple_of=multiple)


def test_plan_is_nearly_as_small_as_possible():
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 4096, 512).tolist()
    assert len(pack_plan(lengths, 8192)) <= 1.05 * (-(-sum(lengths) // 8192)) + 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 1000), st.sampled_from([1, 2, 4]))
def test_columns_of_every_sample_come_back_from_the_pack(count, seed, multiple):
    samples = [random_sample(f"0-0-{i}", seed + i, LIMITS) for i in range(count)]
    batch = pack(samples, LIMITS, token_multiple=multiple)
    bounds = batch.cu_seqlens.tolist()
    assert len(batch.tokens) % multiple == 0
    assert bounds[0] == 0
    assert bounds[-1] == len(batch.tokens)
    for i, sample in enumerate(samples):
        own = slice(bounds[i], bounds[i + 1])
        assert batch.tokens[own].tolist() == [*sample.prompt, *sample.response]
        assert np.array_equal(batch.routing[own][:-1], sample.routing)
        mine = batch.origin.sample == i
        rows = batch.rows[mine]
        # the row that predicts token j is the one before it, inside the same sequence
        assert torch.equal(batch.tokens[rows + 1], batch.labels[mine])
        assert (rows >= bounds[i] + len(sample.prompt) - 1).all()
        assert (rows + 1 < bounds[i + 1]).all()
        assert batch.origin.position[mine].tolist() == list(range(len(sample.response)))
        assert np.array_equal(batch.sampler_logprobs[mine], sample.logprobs)
        assert np.array_equal(batch.candidate_ids[mine], sample.top_ids)
        assert (batch.advantages[mine] == np.float32(sample.advantage)).all()
    assert len(batch.rows) == sum(len(s.response) for s in samples)


@pytest.mark.parametrize("dp,cp", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_ranks_together_hold_every_loss_token_once(dp, cp):
    samples = [random_sample(f"0-0-{i}", i, LIMITS) for i in range(11)]
    found, counts = [], set()
    for d in range(dp):
        for c in range(cp):
            mesh = Mesh(dp=Axis(dp, d), cp=Axis(cp, c))
            batches = make_microbatches(samples, LIMITS, mesh=mesh, tokens_per_gpu=32)
            counts.add(len(batches))
            for batch in (own_chunk(b, mesh) for b in batches):
                assert ((batch.rows >= 0) & (batch.rows < len(batch.tokens))).all()
                names = [batch.origin.sample_ids[i] for i in batch.origin.sample.tolist()]
                found += list(zip(names, batch.origin.position.tolist(), batch.labels.tolist()))
    expected = [(s.sample_id, j, int(t)) for s in samples for j, t in enumerate(s.response)]
    assert sorted(found) == sorted(expected)
    assert len(counts) == 1  # every rank runs the same number of microbatches


def test_a_masked_sample_counts_nowhere():
    samples = [random_sample("a", 1, LIMITS), random_sample("b", 2, LIMITS, masked=True)]
    assert loss_token_count(samples) == len(samples[0].response)
    batch = pack(samples, LIMITS)
    assert int(batch.mask.sum()) == len(samples[0].response)


def test_fewer_samples_than_data_ranks_leave_a_padding_microbatch():
    mesh = Mesh(dp=Axis(2, 1))
    (batch,) = make_microbatches([random_sample("a", 1, LIMITS)], LIMITS, mesh=mesh, tokens_per_gpu=32)
    assert len(batch.tokens) == 1
    assert len(batch.rows) == 0
    assert batch.candidate_ids.shape == (0, LIMITS.candidates)


def with_routing(change):
    sample = random_sample("7-3-2", 5, LIMITS, prompt=3, response=4)
    routing = sample.routing.copy()
    return dataclasses.replace(sample, routing=change(routing))


def set_entry(routing, index, value):
    routing[index] = value
    return routing


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda r: None, "routing is missing"),
        (lambda r: r[:-1], r"shape \[5, 4, 2\], expected .* \[6, 4, 2\]"),
        (lambda r: np.concatenate([r, r[:1]]), r"shape \[7, 4, 2\]"),
        (lambda r: set_entry(r, (4, 2, 0), 6), "row 4, layer 2 names expert 6; experts run from 0 to 5"),
        (lambda r: set_entry(r, (1, 3, 1), -1), "row 1, layer 3 names expert -1"),
        (lambda r: set_entry(r, (2, 1), 3), "row 2, layer 1 names expert 3 twice"),
    ],
)
def test_bad_routing_is_refused_by_sample_id(change, message):
    with pytest.raises(RoutingError, match=f"sample 7-3-2: .*{message}|sample 7-3-2: {message}"):
        check_sample(with_routing(change), LIMITS)


def test_dense_layers_are_ignored_and_replay_off_needs_no_routing():
    check_sample(with_routing(lambda r: set_entry(r, (slice(None), 0), 99)), LIMITS)
    check_sample(with_routing(lambda r: None), limits(replay_routing=False))


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("prompt", np.array([], np.int32), "0 prompt"),
        ("response", np.array([1, 2, 20, 3], np.int32), r"response\[2\] is 20"),
        ("logprobs", np.zeros(3, np.float32), r"logprobs has shape \[3\], expected \[4\]"),
        ("top_ids", np.zeros((4, 6), np.int32), r"top_ids has shape \[4, 6\]"),
        ("top_ids", np.zeros((4, 5), np.int32), "candidate 0 is recorded twice at response position 0"),
        ("top_logprobs", np.zeros((5, 5), np.float32), "top_logprobs has shape"),
        ("advantage", float("nan"), "advantage is nan"),
    ],
)
def test_a_malformed_sample_is_refused_by_its_id(field, value, message):
    sample = dataclasses.replace(random_sample("1-2-3", 5, LIMITS, prompt=3, response=4), **{field: value})
    with pytest.raises(SampleError, match=f"sample 1-2-3: .*{message}|sample 1-2-3: {message}"):
        check_sample(sample, LIMITS)


def test_too_long_and_repeated_samples_are_refused():
    with pytest.raises(SampleError, match="sample x: 70 tokens do not fit a microbatch of 64"):
        check_sample(random_sample("x", 0, LIMITS, prompt=30, response=40), LIMITS)
    twice = [random_sample("x", 0, LIMITS), random_sample("x", 1, LIMITS)]
    with pytest.raises(SampleError, match="sample x appears twice"):
        make_microbatches(twice, LIMITS, tokens_per_gpu=64)


def test_filtered_sampling_may_record_fewer_candidates_and_is_widened():
    sample = random_sample("x", 0, LIMITS)
    narrow = dataclasses.replace(sample, top_ids=sample.top_ids[:, :3], top_logprobs=sample.top_logprobs[:, :3])
    with pytest.raises(SampleError, match=r"expected \[\d+, 5\]"):
        check_sample(narrow, LIMITS)
    support = limits(whole_support=True)
    check_sample(narrow, support)
    batch = pack([narrow], support)
    assert (batch.candidate_ids[:, 3:] == -1).all()
    assert (batch.candidate_logprobs[:, 3:] == -torch.inf).all()
    assert np.array_equal(batch.candidate_ids[:, :3], narrow.top_ids)
    with pytest.raises(SampleError, match=r"top_ids has shape"):
        check_sample(sample, limits(whole_support=True, candidates=4))


def test_unused_candidates_may_repeat():
    sample = random_sample("x", 0, LIMITS)
    ids, logq = sample.top_ids.copy(), sample.top_logprobs.copy()
    ids[:, 2:], logq[:, 2:] = -1, -np.inf
    check_sample(dataclasses.replace(sample, top_ids=ids, top_logprobs=logq), LIMITS)
