"""Answers in both forms decoded to the same arrays; every bad answer named with request, server and field."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from k31core.rl.selection import to_positions
from k31core.rl.types import FinishReason, GenerateRequest, SamplingParams
from k31core.rollout.engine import StaleVersionError
from k31core.rollout.engines.sglang.bulk import split
from k31core.rollout.engines.sglang.payload import (
    Answer,
    ModelShape,
    PayloadError,
    decode_answer,
    decode_scores,
    encode_request,
)
from tests.unit.sglang.answers import SHAPE, VERSION, Made, encoded, make, text_of, with_stop
from tests.unit.sglang.sglang_source import RECORD


def decode(made: Made, body: bytes) -> Any:
    return decode_answer(Answer(body, "http://n0:30000", VERSION), made.request, made.shape)


@pytest.mark.parametrize("flat", [True, False], ids=["binary", "nested"])
@pytest.mark.parametrize(("rows", "k", "prompt"), [(1, 1, 1), (3, 4, 2), (40, 32, 17), (700, 128, 90)])
def test_every_number_arrives(rows: int, k: int, prompt: int, flat: bool) -> None:
    """Small answers go through orjson alone, large ones through the bulk path; both give the same bits."""
    made = make(rows, k, prompt, seed=rows)
    done = decode(made, text_of(made, flat=flat))
    for name in ("tokens", "logprobs", "top_ids", "top_logprobs", "routing"):
        seen, expected = getattr(done, name), getattr(made, name)
        assert seen.dtype == expected.dtype, name
        assert np.array_equal(seen, expected), name
    assert (done.finish, done.policy_version, done.request_id) == (FinishReason.LENGTH, 4, "3-1-2")


def test_large_values_never_reach_the_json_parser() -> None:
    made = make(700, 128, 90)
    for flat in (True, False):
        body = text_of(made, flat=flat)
        parts = split(body)
        assert len(parts.rest) < 6000 < len(body)
        meta = orjson.loads(parts.rest)["meta_info"]
        assert meta["routed_experts"] is None
        assert meta["output_token_logprobs"] is None


def test_extreme_values_are_exact() -> None:
    made = make(200, 16, 3)
    values = made.top_logprobs.copy()
    values[:, 0] = np.float32(-1e-9)
    values[:, -1] = np.float32(-3.4e38)
    values[:, -2] = np.nextafter(np.float32(-80), np.float32(0))
    made = replace(made, top_logprobs=values, tokens=np.full(200, 499, np.int32), logprobs=values[:, 3],
                   top_ids=np.where(made.top_ids == 499, 0, made.top_ids))  # fmt: skip
    ids = np.tile(np.arange(16, dtype=np.int32), (200, 1))
    values[:, 1:-2] = np.linspace(-50, -70, 13, dtype=np.float32)
    made = replace(made, top_ids=ids)
    for flat in (True, False):
        done = decode(made, text_of(made, flat=flat))
        assert np.array_equal(done.top_logprobs, values)


def test_ties_and_disorder_are_put_in_order() -> None:
    made = make(2, 4, 1)
    made = replace(
        made,
        tokens=np.array([9, 9], np.int32),
        logprobs=np.array([-2, -2], np.float32),
        top_ids=np.array([[7, 5, 3, 1], [1, 2, 3, 4]], np.int32),
        top_logprobs=np.array([[-2, -2, -1.5, -3], [-1, -2, -3, -4]], np.float32),
    )
    done = decode(made, text_of(made, flat=True))
    assert done.top_ids.tolist() == [[3, 5, 7, 1], [1, 2, 3, 4]]
    assert done.top_logprobs.tolist() == [[-1.5, -2, -2, -3], [-1, -2, -3, -4]]


def test_stop_and_abort() -> None:
    made = with_stop(make(5, 4, 3))
    done = decode(made, text_of(made, flat=True, finish_reason={"type": "stop", "matched": 1}))
    assert done.finish is FinishReason.STOP
    done = decode(made, text_of(made, flat=True, finish_reason={"type": "abort", "message": "Aborted"}))
    assert done.finish is FinishReason.ABORT
    assert len(done.tokens) == 5


MADE = make(60, 16, 9)
TOP = MADE.top_logprobs.copy()
TOP[7, 2] = np.nan
DOUBLE = MADE.top_ids.copy()
DOUBLE[7, 2] = DOUBLE[7, 3]
HEAVY = MADE.top_logprobs.copy()
HEAVY[11, :2] = -0.1
OTHER = MADE.top_logprobs.copy()
OTHER[5] = MADE.top_logprobs[5] - 0.5
OUTSIDE = MADE.top_ids.copy()
OUTSIDE[3, 3] = 500
WRONG_EXPERT = MADE.routing.astype("<i4").copy()
WRONG_EXPERT[4, 1, 1] = 16
NEGATIVE = MADE.routing.astype("<i4").copy()
NEGATIVE[4, 1, 1] = -1
LOGPROBS = [[float(p), int(t), None] for p, t in zip(MADE.logprobs, MADE.tokens, strict=True)]

BAD: dict[str, tuple[Made, dict[str, Any], str]] = {
    "NaN candidate": (replace(MADE, top_logprobs=TOP), {}, r"candidate 2 of position 7 has log-prob nan"),
    "candidate twice": (replace(MADE, top_ids=DOUBLE), {}, r"a candidate occurs twice at position 7"),
    "mass above one": (replace(MADE, top_logprobs=HEAVY), {}, r"candidates of position 11 have probability 1\.9"),
    "own log-prob differs": (replace(MADE, top_logprobs=OTHER), {}, r"position 5: the sampled token's log-prob"),
    "outside the vocabulary": (replace(MADE, top_ids=OUTSIDE), {}, r"a candidate outside the vocabulary of 500"),
    "NaN log-prob": (
        MADE,
        {"output_token_logprobs": [*LOGPROBS[:8], [None, LOGPROBS[8][1], None], *LOGPROBS[9:]]},
        r"log-prob nan at position 8",
    ),
    "positive log-prob": (
        MADE,
        {"output_token_logprobs": [[0.5, LOGPROBS[0][1], None], *LOGPROBS[1:]]},
        r"log-prob 0\.5 at position 0",
    ),
    "too few log-probs": (MADE, {"output_token_logprobs": LOGPROBS[:-1]}, r"has 59 rows, the answer has 60 tokens"),
    "log-prob of another token": (
        MADE,
        {"output_token_logprobs": [[-1.0, (LOGPROBS[0][1] + 1) % 500, None], *LOGPROBS[1:]]},
        r"names token \d+ at position 0, output_ids has \d+",
    ),
    "routing row too few": (
        MADE,
        {"routed_experts": encoded(MADE.routing[:-1].astype("<i4"))},
        r"routed_experts has 67 rows .* expected 68 \(prompt 9 \+ response 60 − 1\)",
    ),
    "routing row too many": (
        MADE,
        {"routed_experts": encoded(np.concatenate([MADE.routing, MADE.routing[:1]]).astype("<i4"))},
        r"routed_experts has 69 rows",
    ),
    "routing of other width": (
        MADE,
        {"routed_experts": encoded(np.zeros(77, "<i4"))},
        r"routed_experts has 12\.8333 r",
    ),
    "expert too large": (MADE, {"routed_experts": encoded(WRONG_EXPERT)}, r"routed_experts holds expert 16 of 16"),
    "expert negative": (MADE, {"routed_experts": encoded(NEGATIVE)}, r"routed_experts holds expert -1 of 16"),
    "no routing": (MADE, {"routed_experts": None}, r"no routed_experts; start the server with --enable-return-routed"),
    "routing not base64": (MADE, {"routed_experts": "@@@"}, r"routed_experts is not base64"),
    "early length": (
        make(30, 4, 9),
        {"finish_reason": {"type": "length"}, "_limit": 40},
        r"30 tokens ended by length, the limit was 40",
    ),
    "stop without a stop token": (MADE, {"finish_reason": {"type": "stop"}}, r"ended by stop at token \d+, the stop t"),
    "unknown end": (MADE, {"finish_reason": {"type": "weird"}}, r"finish_reason is .*weird.*expected stop, length"),
    "not finished": (MADE, {"finish_reason": None}, r"finish_reason is None"),
    "server aborted": (
        MADE,
        {"finish_reason": {"type": "abort", "message": "KV cache is full", "status_code": 503}},
        r"the server aborted it: KV cache is full \(503\)",
    ),
    "nothing drawn": (
        replace(MADE, request=MADE.request),
        {"output_ids": [], "output_token_logprobs": []},
        r"expected",
    ),
}


@pytest.mark.parametrize("flat", [True, False], ids=["binary", "nested"])
@pytest.mark.parametrize("fault", BAD)
def test_bad_answers_are_named(fault: str, flat: bool) -> None:
    made, changes, message = BAD[fault]
    changes = dict(changes)
    limit = changes.pop("_limit", None)
    if limit:
        made = replace(made, request=replace(made.request, params=replace(made.request.params, max_new_tokens=limit)))
    with pytest.raises(PayloadError, match=message) as error:
        decode(made, text_of(made, flat=flat, **changes))
    assert str(error.value).startswith("request 3-1-2, server http://n0:30000: ")


@pytest.mark.parametrize("rows_sent", [59, 61])
def test_wrong_number_of_candidate_rows(rows_sent: int) -> None:
    rows = np.resize(np.arange(60), rows_sent)
    other = replace(MADE, top_ids=MADE.top_ids[rows], top_logprobs=MADE.top_logprobs[rows])
    nested = orjson.loads(text_of(other, flat=False))["meta_info"]["output_top_logprobs"]
    with pytest.raises(PayloadError, match=rf"{rows_sent * 16} candidate log-probs .* 60 tokens x 16 candidates"):
        decode(MADE, text_of(MADE, flat=False, output_top_logprobs=nested))
    binary = orjson.loads(text_of(other, flat=True))["meta_info"]
    changes = {key: value for key, value in binary.items() if key.startswith("output_top_logprobs")}
    with pytest.raises(PayloadError, match=rf"candidates have shape \[{rows_sent}, 16\] .* expected \[60, 16\]"):
        decode(MADE, text_of(MADE, flat=True, **changes))


def test_ragged_candidates() -> None:
    nested = orjson.loads(text_of(MADE, flat=False))["meta_info"]["output_top_logprobs"]
    nested[5] = nested[5][:-1]
    with pytest.raises(PayloadError, match="candidate"):
        decode(MADE, text_of(MADE, flat=False, output_top_logprobs=nested))
    nested[5] = None
    with pytest.raises(PayloadError, match="output_top_logprobs is not an array"):
        decode(MADE, text_of(MADE, flat=False, output_top_logprobs=nested))


@pytest.mark.parametrize("flat", [True, False])
def test_another_version_is_stale(flat: bool) -> None:
    with pytest.raises(StaleVersionError, match=rf"answered by weights 'k31-v3', version 4 needs '{VERSION}'"):
        decode(MADE, text_of(MADE, flat=flat, weight_version="k31-v3"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"meta_info": {}}',
        b"null",
        text_of(MADE, flat=False)[:-3000],
        text_of(MADE, flat=True)[:-90],
    ],
    ids=["empty", "cut", "list", "no fields", "null", "cut in an array", "cut at the end"],
)
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(PayloadError, match=r"request 3-1-2, server http://n0:30000"):
        decode(MADE, body)


def test_dtype_markers_are_believed() -> None:
    with pytest.raises(PayloadError, match=r"val_flat_b64_dtype is 'float16', expected 'float32'"):
        decode(MADE, text_of(MADE, flat=True, output_top_logprobs_val_flat_b64_dtype="float16"))


def test_no_candidates_and_no_routing() -> None:
    params = SamplingParams(0.0, 1.0, 0, 60, (), seed=1)
    plain = replace(MADE, request=replace(MADE.request, params=params))
    done = decode(plain, text_of(MADE, flat=False))
    assert (done.top_ids.shape, done.routing) == ((60, 0), None)


def test_requests_use_only_fields_that_sglang_has() -> None:
    known = orjson.loads(RECORD.read_bytes())["requests"]["GenerateReqInput"]
    for flat in (True, False):
        body = orjson.loads(encode_request(MADE.request, rid="a.0", lora_name="k31-v4-1", flat=flat))
        assert set(body) <= set(known)
        assert ("return_flat_raw_output_top_logprobs" in body) is flat
    assert body["lora_path"] == "k31-v4-1"
    assert body["input_ids"] == list(range(9))
    assert body["sampling_params"]["top_k"] == -1
    assert "lora_path" not in orjson.loads(encode_request(MADE.request, rid="a", lora_name=None, flat=True))


def test_filtered_sampling_with_candidates_is_refused() -> None:
    params = replace(MADE.request.params, top_p=0.9)
    with pytest.raises(ValueError, match=r"top_p 0\.9, top_k 0 with recorded candidates"):
        encode_request(replace(MADE.request, params=params), rid="a", lora_name=None, flat=True)


def test_scores() -> None:
    def body(rows: list[Any]) -> bytes:
        return orjson.dumps({"meta_info": {"input_token_logprobs": rows}})

    rows = [[None, 5, None], [-1.5, 6, None], [-0.25, 7, None]]
    assert decode_scores(body(rows), (5, 6, 7), "s") == (-1.5, -0.25)
    for bad in (rows[1:], [*rows[:2], [None, 7, None]], [[None, 5, None], [-1.5, 9, None], rows[2]]):
        with pytest.raises(PayloadError, match="scores from s"):
            decode_scores(body(bad), (5, 6, 7), "s")


def test_shape_of_a_large_model() -> None:
    """93 layers of 16 experts, as published: int16 holds 896 experts."""
    shape = ModelShape(163840, 93, 896, 16)
    made = make(64, 128, 8, shape=shape)
    done = decode(made, text_of(made, flat=True))
    assert done.routing.shape == (71, 93, 16)
    assert int(done.routing.max()) == int(made.routing.max()) > 850
    assert re.fullmatch(r"int16", str(done.routing.dtype))
    assert SHAPE.num_layers == 3
    assert isinstance(made.request, GenerateRequest)


SELECTING = replace(
    MADE,
    request=replace(MADE.request, params=replace(MADE.request.params, return_selection=True)),
    shape=replace(SHAPE, index_layers=2, index_topk=7),
)


def chosen_positions() -> np.ndarray:
    """`[68, 2, 7]` as SGLang would send them: any order, -1 where fewer are visible."""
    rng = np.random.default_rng(0)
    out = np.full((68, 2, 7), -1, "<i4")
    for row in range(68):
        for layer in range(2):
            out[row, layer, : min(7, row + 1)] = rng.permutation(row + 1)[:7]
    return out


@pytest.mark.parametrize("flat", [True, False], ids=["binary", "nested"])
def test_selected_keys_are_decoded(flat: bool) -> None:
    sent = chosen_positions()
    done = decode(SELECTING, text_of(SELECTING, flat=flat, indexer_topk=encoded(sent)))
    assert done.selection is not None
    back = to_positions(done.selection, 68)
    expected = np.sort(np.where(sent < 0, 99, sent), axis=-1)
    assert np.array_equal(back, np.where(expected == 99, -1, expected))
    body = orjson.loads(encode_request(SELECTING.request, rid="a", lora_name=None, flat=flat))
    assert body["return_indexer_topk"] is True
    assert "return_indexer_topk" in orjson.loads(RECORD.read_bytes())["requests"]["GenerateReqInput"]
    assert "return_indexer_topk" not in orjson.loads(encode_request(MADE.request, rid="a", lora_name=None, flat=flat))


SLOTS = chosen_positions() + 4096
TWICE = chosen_positions()
TWICE[40, 1, :2] = 3
LATER = chosen_positions()
LATER[40, 0, 6] = 41
FEW = chosen_positions()
FEW[40, 1, 3] = -1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no indexer_topk; start the server with --enable-return-indexer-topk"),
        (
            encoded(chosen_positions()[:-1]),
            r"has 938 entries, expected 68 rows \(prompt 9 \+ response 60 − 1\) x 2 layers",
        ),
        (encoded(SLOTS), r"row 0, indexer layer 0 names token 409\d; it can attend 0 to 0"),
        (encoded(TWICE), "row 40, indexer layer 1 names token 3 twice"),
        (encoded(LATER), "row 40, indexer layer 0 names token 41; it can attend 0 to 40"),
        (encoded(FEW), "row 40, indexer layer 1 names 6 tokens, expected 7"),
        ("@@@", "indexer_topk is not base64"),
    ],
)
def test_selected_keys_that_do_not_fit_are_refused_by_request(value: str | None, message: str) -> None:
    with pytest.raises(PayloadError, match=rf"request 3-1-2, server .*: .*{message}"):
        decode(SELECTING, text_of(SELECTING, flat=True, indexer_topk=value))
