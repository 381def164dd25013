"""SGLang's native `/generate`: our request as its JSON, its answer as our Completion, checked in bulk.

Axes: P prompt tokens, R response tokens, K candidates, L decoder layers, E_k experts a token, M layers with an indexer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from k31core.rl.selection import SelectedKeys, SelectionError, from_positions
from k31core.rl.types import Completion, FinishReason, FloatArray, GenerateRequest, IntArray, SamplingParams
from k31core.rollout.engine import EngineError, StaleVersionError
from k31core.rollout.engines.sglang.bulk import BulkError, Split, from_base64, split, triples

_LOGPROB_SLACK = 1e-3
"""fp32 log-softmax may exceed 0, and the sum of the candidates 1, by rounding."""
_SAME_LOGPROB = 1e-4
"""The sampled token's own log-prob against its entry among the candidates."""


class PayloadError(EngineError):
    """An answer that must not be trained on: names the request, the server, the field and the values."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the answers must agree with; from the checkpoint's `config.json`."""

    vocab_size: int
    num_layers: int
    num_experts: int
    experts_per_token: int
    index_layers: int = 0
    """M; 0 without DSA."""
    index_topk: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer and where it came from."""

    body: bytes
    server: str
    weight_version: str
    """What the server must call its weights."""


def encode_request(request: GenerateRequest, *, rid: str, lora_name: str | None, flat: bool) -> bytes:
    """The body of `/generate`. `flat` asks for the binary form of the candidates (SGLang from 0.5.22).

    Raises ValueError for filtered sampling with candidates: SGLang's log-probs are those before the filter.
    """
    params = request.params
    if params.top_logprobs_num and (params.top_p != 1.0 or params.top_k):
        raise ValueError(
            f"request {request.request_id}: top_p {params.top_p}, top_k {params.top_k} with recorded candidates: "
            f"SGLang returns log-probs before the filter, so the sampled support is unknown; "
            f"use rollout.top_p 1.0 and top_k 0"
        )
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.tokens),
        "sampling_params": _sampling_params(params),
        "return_logprob": True,
        "top_logprobs_num": params.top_logprobs_num,
        "return_text_in_logprobs": False,
        "return_routed_experts": params.return_routing,
        "stream": False,
    }
    if lora_name is not None:
        body["lora_path"] = lora_name
    if params.return_selection:
        body["return_indexer_topk"] = True
    if flat and params.top_logprobs_num:
        body["return_flat_raw_output_top_logprobs"] = True
        body["return_flat_raw_top_logprobs_b64"] = True
    return orjson.dumps(body)


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # only the stop tokens of the request count
        "no_stop_trim": True,  # the stop token is part of the answer
        "skip_special_tokens": False,
        # heeded only with --enable-deterministic-inference (rollout.engine.extra_args); a signed 64-bit number
        "sampling_seed": params.seed & (2**63 - 1),
    }


def decode_answer(answer: Answer, request: GenerateRequest, shape: ModelShape) -> Completion:
    """Check an answer and turn it into a Completion. Raises PayloadError or StaleVersionError."""
    where = f"request {request.request_id}, server {answer.server}"
    try:
        parts = split(answer.body)
        tree = orjson.loads(parts.rest)
        meta = tree["meta_info"]
        finish = _finish(meta, where)
        _check_version(meta, answer, request, where)
        tokens = np.asarray(tree["output_ids"], dtype=np.int32).reshape(-1)
        logprobs = _token_logprobs(parts, meta, tokens, where)
        top_ids, top_logprobs = _candidates(parts, meta, request.params.top_logprobs_num, tokens.size, where)
        routing = _routing(parts, meta, request, tokens.size, shape, where) if request.params.return_routing else None
        selection = _selection(parts, meta, request, tokens.size, shape) if request.params.return_selection else None
    except BulkError as error:
        raise PayloadError(f"{where}: {error}") from error
    except SelectionError as error:
        raise PayloadError(f"{where}: indexer_topk {error}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise PayloadError(
            f"{where}: the answer is not what SGLang's /generate sends ({type(error).__name__}: {error}): "
            f"{answer.body[:200]!r}"
        ) from error
    if finish is not FinishReason.ABORT:
        _check_tokens(tokens, logprobs, request, finish, shape, where)
        _check_candidates(tokens, logprobs, top_ids, top_logprobs, shape, where)
    top_ids, top_logprobs = _in_order(top_ids, top_logprobs)
    return Completion(
        request.request_id, tokens, logprobs, top_ids, top_logprobs, routing, finish, request.policy_version, selection
    )


def decode_scores(body: bytes, tokens: tuple[int, ...], server: str) -> tuple[float, ...]:
    """Log-probs `[n − 1]` of a prompt that was sent with `logprob_start_len` 0."""
    try:
        rows = orjson.loads(body)["meta_info"]["input_token_logprobs"]
        values = [row[0] for row in rows][1:]
        ids = [row[1] for row in rows]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise PayloadError(f"scores from {server}: no input_token_logprobs ({error}): {body[:200]!r}") from error
    if ids != list(tokens) or any(value is None for value in values):
        raise PayloadError(
            f"scores from {server}: {len(ids)} positions, {len(tokens)} tokens were sent, or a value is missing; "
            f"the prefix cache may have swallowed some (flush it)"
        )
    return tuple(float(value) for value in values)


def _finish(meta: Mapping[str, Any], where: str) -> FinishReason:
    reason = meta["finish_reason"]
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in ("stop", "length", "abort"):
        raise PayloadError(f"{where}: finish_reason is {reason!r}, expected stop, length or abort")
    if kind == "abort" and isinstance(reason, dict) and reason.get("status_code"):
        raise PayloadError(f"{where}: the server aborted it: {reason.get('message')} ({reason['status_code']})")
    return FinishReason(kind)


def _check_version(meta: Mapping[str, Any], answer: Answer, request: GenerateRequest, where: str) -> None:
    seen = str(meta.get("weight_version"))
    if seen != answer.weight_version:
        raise StaleVersionError(
            f"{where}: answered by weights {seen!r}, version {request.policy_version} needs {answer.weight_version!r}; "
            f"load the adapter again"
        )


def _token_logprobs(parts: Split, meta: Mapping[str, Any], tokens: IntArray, where: str) -> FloatArray:
    key = "output_token_logprobs"
    values, ids = triples(parts.parts.get(key) or meta[key] or [], key)
    if values.size != tokens.size:
        raise PayloadError(f"{where}: {key} has {values.size} rows, the answer has {tokens.size} tokens")
    if not np.array_equal(ids, tokens):
        at = int(np.flatnonzero(ids != tokens)[0])
        raise PayloadError(f"{where}: {key} names token {ids[at]} at position {at}, output_ids has {tokens[at]}")
    return values


def _candidates(parts: Split, meta: Mapping[str, Any], k: int, rows: int, where: str) -> tuple[IntArray, FloatArray]:
    """(ids `[R, K]`, log-probs `[R, K]`), from the binary form or the nested one."""
    if k == 0:
        return np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32)
    if "output_top_logprobs_shape" in meta:
        values, ids = _flat_candidates(parts, meta, rows, k, where)
    else:
        key = "output_top_logprobs"
        nested = parts.parts.get(key) or meta.get(key) or []
        values, ids = triples(nested, key)
    if values.size != rows * k or ids.size != rows * k:
        raise PayloadError(
            f"{where}: {values.size} candidate log-probs and {ids.size} ids, {rows} tokens x {k} candidates expected"
        )
    return ids.reshape(rows, k), values.reshape(rows, k)


def _flat_candidates(
    parts: Split, meta: Mapping[str, Any], rows: int, k: int, where: str
) -> tuple[FloatArray, IntArray]:
    shape, prefix = list(meta["output_top_logprobs_shape"]), meta.get("output_top_logprobs_null_prefix", 0)
    if shape != [rows, k] or prefix:
        raise PayloadError(
            f"{where}: candidates have shape {shape} after {prefix} empty rows, expected [{rows}, {k}] and none"
        )
    arrays: list[NDArray[np.generic]] = []
    for side, dtype in (("val", np.float32), ("idx", np.int32)):
        key = f"output_top_logprobs_{side}_flat_b64"
        name = meta.get(f"{key}_dtype")
        if name != np.dtype(dtype).name:
            raise PayloadError(f"{where}: {key}_dtype is {name!r}, expected {np.dtype(dtype).name!r}")
        arrays.append(from_base64(parts.parts.get(key) or meta[key], dtype, key))
    return arrays[0].astype(np.float32, copy=False), arrays[1].astype(np.int32, copy=False)


def _routing(
    parts: Split, meta: Mapping[str, Any], request: GenerateRequest, rows: int, shape: ModelShape, where: str
) -> NDArray[np.int16]:
    """`[P + R − 1, L, E_k]` int16."""
    key = "routed_experts"
    part = parts.parts.get(key) or meta.get(key)
    if part is None:
        raise PayloadError(f"{where}: no {key}; start the server with --enable-return-routed-experts")
    flat = from_base64(part, np.int32, key)
    expected = (len(request.tokens) + rows - 1, shape.num_layers, shape.experts_per_token)
    if flat.size != int(np.prod(expected)):
        per_row = shape.num_layers * shape.experts_per_token
        raise PayloadError(
            f"{where}: {key} has {flat.size / per_row:g} rows of {shape.num_layers} layers x "
            f"{shape.experts_per_token} experts, expected {expected[0]} "
            f"(prompt {len(request.tokens)} + response {rows} − 1)"
        )
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    if low < 0 or high >= shape.num_experts:
        raise PayloadError(f"{where}: {key} holds expert {low if low < 0 else high} of {shape.num_experts}")
    return flat.astype(np.int16).reshape(expected)


def _selection(
    parts: Split, meta: Mapping[str, Any], request: GenerateRequest, rows: int, shape: ModelShape
) -> SelectedKeys:
    """The keys of every layer with an indexer, base64 int32 `[P + R − 1, M, topk]` in the answer, -1 for none.

    Read as positions in the request's own tokens; anything else (cache slots, say) breaks the checks and is refused.
    """
    key = "indexer_topk"
    part = parts.parts.get(key) or meta.get(key)
    if part is None:
        raise BulkError(f"no {key}; start the server with --enable-return-indexer-topk")
    flat = from_base64(part, np.int32, key)
    inputs, layers, topk = len(request.tokens) + rows - 1, shape.index_layers, shape.index_topk
    if flat.size != inputs * layers * topk:
        raise BulkError(
            f"{key} has {flat.size} entries, expected {inputs} rows (prompt {len(request.tokens)} + response {rows} "
            f"− 1) x {layers} layers x {topk} keys"
        )
    return from_positions(flat.astype(np.int32).reshape(inputs, layers, topk), topk)


def _check_tokens(
    tokens: IntArray,
    logprobs: FloatArray,
    request: GenerateRequest,
    finish: FinishReason,
    shape: ModelShape,
    where: str,
) -> None:
    limit = request.params.max_new_tokens
    if not 1 <= tokens.size <= limit or (finish is FinishReason.LENGTH and tokens.size != limit):
        raise PayloadError(f"{where}: {tokens.size} tokens ended by {finish.value}, the limit was {limit}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= shape.vocab_size:
        raise PayloadError(f"{where}: a token outside the vocabulary of {shape.vocab_size}: {tokens.max()}")
    if finish is FinishReason.STOP and int(tokens[-1]) not in request.params.stop_token_ids:
        raise PayloadError(
            f"{where}: ended by stop at token {tokens[-1]}, the stop tokens are {request.params.stop_token_ids}"
        )
    bad = ~np.isfinite(logprobs) | (logprobs > _LOGPROB_SLACK)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise PayloadError(f"{where}: log-prob {logprobs[at]} at position {at} (token {tokens[at]})")


def _check_candidates(
    tokens: IntArray, logprobs: FloatArray, ids: IntArray, values: FloatArray, shape: ModelShape, where: str
) -> None:
    if ids.shape[1] == 0:
        return
    bad = ~np.isfinite(values) | (values > _LOGPROB_SLACK)
    if bad.any():
        at, j = (int(i) for i in np.argwhere(bad)[0])
        raise PayloadError(f"{where}: candidate {j} of position {at} has log-prob {values[at, j]}")
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
        raise PayloadError(f"{where}: a candidate outside the vocabulary of {shape.vocab_size}")
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if twice.any():
        raise PayloadError(f"{where}: a candidate occurs twice at position {int(np.flatnonzero(twice)[0])}")
    mass = np.exp(values).sum(axis=1)
    if float(mass.max()) > 1 + _LOGPROB_SLACK:
        at = int(mass.argmax())
        raise PayloadError(f"{where}: the candidates of position {at} have probability {mass[at]:.4f}, more than 1")
    own = ids == tokens[:, None]
    gap = np.abs(np.where(own, values - logprobs[:, None], 0)).max(axis=1)
    if float(gap.max()) > _SAME_LOGPROB:
        at = int(gap.argmax())
        raise PayloadError(
            f"{where}: position {at}: the sampled token's log-prob {logprobs[at]:.6f} and its candidate's differ by "
            f"{gap[at]:.2e}"
        )


def _in_order(ids: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Falling log-probs, ties by smaller id: only rows that are not so already are sorted."""
    if ids.shape[1] < 2:
        return ids, values
    rises = values[:, 1:] > values[:, :-1]
    ties = (values[:, 1:] == values[:, :-1]) & (ids[:, 1:] < ids[:, :-1])
    rows = np.flatnonzero((rises | ties).any(axis=1))
    if rows.size:
        ids, values = ids.copy(), values.copy()
        order = np.lexsort((ids[rows], -values[rows]), axis=1)
        ids[rows] = np.take_along_axis(ids[rows], order, axis=1)
        values[rows] = np.take_along_axis(values[rows], order, axis=1)
    return ids, values
