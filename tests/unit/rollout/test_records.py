"""Rollout records: what is written is what is read, and nothing that does not fit is written or read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k31core.checkpoint.commit import commit, new_staging, verify_directory
from k31core.rl.selection import from_positions
from k31core.rl.types import Completion, FinishReason, GradeReason, Group, Prompt, Sample, Verdict
from k31core.rollout.records import COLUMNS_FILE, NAMES_FILE, RecordError, read_groups, write_groups


def random_keys(rng, inputs, layers=2, topk=3):
    positions = np.full((inputs, layers, topk), -1)
    for row in range(inputs):
        for layer in range(layers):
            positions[row, layer, : min(row + 1, topk)] = rng.permutation(row + 1)[:topk]
    return from_positions(positions, topk)


def sample(rng, group, index, prompt, *, width=6, routing=True, selection=False):
    """A random sample; every second one has unused candidates."""
    count = int(rng.integers(1, 9))
    ids = np.stack([rng.permutation(50)[:width] for _ in range(count)]).astype(np.int32)
    values = -rng.random((count, width), dtype=np.float32)
    if index % 2:
        ids[:, -2:], values[:, -2:] = -1, -np.inf
    completion = Completion(
        request_id=f"3-{group}-{index}",
        tokens=rng.integers(0, 50, count).astype(np.int32),
        logprobs=-rng.random(count, dtype=np.float32),
        top_ids=ids,
        top_logprobs=values,
        routing=rng.integers(0, 8, (len(prompt.tokens) + count - 1, 5, 2)).astype(np.int16) if routing else None,
        finish=FinishReason.STOP if index % 3 else FinishReason.LENGTH,
        policy_version=2,
        selection=random_keys(rng, len(prompt.tokens) + count - 1) if selection else None,
    )
    verdict = Verdict(index % 2, None, GradeReason.CORRECT if index % 2 else GradeReason.NO_BOX, GradeReason.WRONG)
    return Sample(f"3-{group}-{index}", prompt, completion, float(index % 2), verdict, group)


def make_groups(count=4, samples=3, **options):
    rng = np.random.default_rng(0)
    groups = []
    for group in range(count):
        tokens = tuple(rng.integers(0, 50, 3 + group).tolist())
        prompt = Prompt(f"id{group}", tokens, f"ανσ{group}", row=10 * group, epoch=group % 2)
        groups.append(Group(prompt, tuple(sample(rng, group, i, prompt, **options) for i in range(samples))))
    return groups


def assert_equal(a, b):
    assert [g.prompt for g in a] == [g.prompt for g in b]
    for left, right in zip((s for g in a for s in g.samples), (s for g in b for s in g.samples), strict=True):
        assert (left.sample_id, left.reward, left.verdict, left.group) == (
            right.sample_id,
            right.reward,
            right.verdict,
            right.group,
        )
        one, two = left.completion, right.completion
        assert (one.request_id, one.finish, one.policy_version) == (two.request_id, two.finish, two.policy_version)
        for field in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            assert getattr(one, field).dtype == getattr(two, field).dtype
            assert np.array_equal(getattr(one, field), getattr(two, field)), field
        assert (one.selection is None) == (two.selection is None)
        if one.selection is not None:
            assert one.selection.topk == two.selection.topk
            assert np.array_equal(one.selection.bits, two.selection.bits)
        assert (one.routing is None) == (two.routing is None)
        if one.routing is not None:
            assert one.routing.dtype == two.routing.dtype and np.array_equal(one.routing, two.routing)


@pytest.mark.parametrize("options", [{}, {"routing": False}, {"width": 0}], ids=["all", "no-routing", "no-candidates"])
def test_round_trip_through_a_commit(tmp_path, options):
    """Unused candidates come back as -inf, and the committed file passes the finite check."""
    if options.get("width") == 0:
        groups = [
            Group(g.prompt, tuple(replace(s, completion=_bare(s.completion)) for s in g.samples)) for g in make_groups()
        ]
    else:
        groups = make_groups(**options)
    staging = new_staging(tmp_path / "step-00003")
    write_groups(staging, groups)
    commit(staging, tmp_path / "step-00003", kind="rollout", facts={"step": 3})
    verify_directory(tmp_path / "step-00003")
    assert_equal(read_groups(tmp_path / "step-00003"), groups)


def _bare(completion):
    count = len(completion.tokens)
    return replace(
        completion, top_ids=np.zeros((count, 0), np.int32), top_logprobs=np.zeros((count, 0), dtype=np.float32)
    )


def test_candidates_of_different_width_are_padded(tmp_path):
    """A filtered sample with a small support beside one with a large one."""
    groups = make_groups(count=1, samples=2)
    first = groups[0].samples[0]
    narrow = replace(first.completion, top_ids=first.completion.top_ids[:, :2])
    narrow = replace(narrow, top_logprobs=first.completion.top_logprobs[:, :2])
    groups = [Group(groups[0].prompt, (replace(first, completion=narrow), groups[0].samples[1]))]
    write_groups(tmp_path, groups)
    read = read_groups(tmp_path)[0].samples[0].completion
    assert np.array_equal(read.top_ids[:, :2], narrow.top_ids) and (read.top_ids[:, 2:] == -1).all()
    assert np.isneginf(read.top_logprobs[:, 2:]).all()


def _break(completion, **fields):
    return replace(completion, **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"logprobs": c.logprobs[:-1]}, "logprobs has shape"),
        (lambda c: {"top_logprobs": c.top_logprobs[:, :-1]}, "top_logprobs has shape"),
        (lambda c: {"routing": c.routing[:-1]}, "routing .* has shape"),
        (lambda c: {"routing": np.concatenate([c.routing, c.routing[:1]])}, "routing .* has shape"),
        (lambda c: {"logprobs": np.full_like(c.logprobs, np.nan)}, "response token 0 is nan"),
        (lambda c: {"top_logprobs": np.full_like(c.top_logprobs, -np.inf)}, "candidate of response token 0"),
        (lambda c: {"routing": None}, "has no routing, others have"),
    ],
)
def test_samples_that_do_not_fit_are_not_written(tmp_path, change, message):
    groups = make_groups()
    bad = groups[2].samples[1]
    changed = replace(bad, completion=_break(bad.completion, **change(bad.completion)))
    groups[2] = Group(groups[2].prompt, (groups[2].samples[0], changed, groups[2].samples[2]))
    with pytest.raises(RecordError, match=f"sample 3-2-1.*{message}"):
        write_groups(tmp_path, groups)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("column", ["prompt_tokens", "response_tokens", "logprobs", "top_ids", "routing", "rewards"])
def test_shortened_column_is_refused(tmp_path, column):
    write_groups(tmp_path, make_groups())
    columns = load_file(tmp_path / COLUMNS_FILE)
    columns[column] = columns[column][:-1].copy()
    save_file(columns, tmp_path / COLUMNS_FILE)
    with pytest.raises(RecordError, match=column):
        read_groups(tmp_path)


def test_missing_column_other_dtype_and_broken_files_are_refused(tmp_path):
    write_groups(tmp_path, make_groups())
    columns = load_file(tmp_path / COLUMNS_FILE)
    save_file({k: v for k, v in columns.items() if k != "logprobs"}, tmp_path / COLUMNS_FILE)
    with pytest.raises(RecordError, match="logprobs is missing"):
        read_groups(tmp_path)
    save_file(columns | {"logprobs": columns["logprobs"].astype(np.float64)}, tmp_path / COLUMNS_FILE)
    with pytest.raises(RecordError, match="logprobs is float64"):
        read_groups(tmp_path)
    save_file(columns, tmp_path / COLUMNS_FILE)
    names = json.loads((tmp_path / NAMES_FILE).read_text())
    (tmp_path / NAMES_FILE).write_text(json.dumps(names | {"samples": names["samples"][:-1]}))
    with pytest.raises(RecordError, match="response_offsets"):
        read_groups(tmp_path)
    (tmp_path / NAMES_FILE).write_text("{")
    with pytest.raises(RecordError, match=NAMES_FILE):
        read_groups(tmp_path)
    (tmp_path / COLUMNS_FILE).write_bytes(b"short")
    with pytest.raises(RecordError, match=COLUMNS_FILE):
        read_groups(tmp_path)


def test_selected_keys_come_back_and_take_a_bit_each(tmp_path):
    groups = make_groups(selection=True)
    write_groups(tmp_path, groups)
    assert_equal(groups, read_groups(tmp_path))
    column = load_file(tmp_path / COLUMNS_FILE)["selection"]
    inputs = [len(g.prompt.tokens) + len(s.completion.tokens) - 1 for g in groups for s in g.samples]
    assert column.nbytes == sum(max(0, n - 3) * 2 * -(-n // 8) for n in inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"selection": None}, "has \\(2, 3\\)|\\(layers, top-k\\) None"),
        (lambda c: {"selection": replace(c.selection, topk=2)}, "the DSA selection is uint8 of shape"),
        (lambda c: {"selection": replace(c.selection, bits=c.selection.bits[1:])}, "the DSA selection is uint8 of"),
        (lambda c: {"selection": replace(c.selection, bits=c.selection.bits * 0)}, "names 0 different tokens"),
    ],
)
def test_selected_keys_that_do_not_fit_are_not_written(tmp_path, change, message):
    groups = make_groups(selection=True)
    samples = list(groups[3].samples)
    at = max(range(3), key=lambda i: len(samples[i].completion.tokens))
    completion = samples[at].completion
    samples[at] = replace(samples[at], completion=replace(completion, **change(completion)))
    groups[3] = Group(groups[3].prompt, tuple(samples))
    with pytest.raises(RecordError, match=f"sample 3-3-{at}.*({message})"):
        write_groups(tmp_path, groups)


def test_selected_keys_of_another_shape_are_not_read(tmp_path):
    write_groups(tmp_path, make_groups(selection=True))
    columns = load_file(tmp_path / COLUMNS_FILE)
    save_file(columns | {"selection_shape": np.array([2, 4])}, tmp_path / COLUMNS_FILE)
    with pytest.raises(RecordError, match="bytes of selected keys, expected"):
        read_groups(tmp_path)
    save_file(columns | {"selection": columns["selection"][:-1]}, tmp_path / COLUMNS_FILE)
    with pytest.raises(RecordError, match="selection"):
        read_groups(tmp_path)
    save_file({k: v for k, v in columns.items() if k != "selection_shape"}, tmp_path / COLUMNS_FILE)
    with pytest.raises(RecordError, match="selection_shape is missing"):
        read_groups(tmp_path)
