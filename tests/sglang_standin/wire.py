"""Bodies of the stand-in: SGLang's request as ours, our completion as SGLang's answer."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from k31core.rl.selection import to_positions
from k31core.rl.types import Completion, FinishReason, GenerateRequest, SamplingParams

KNOWN = json.loads((Path(__file__).parents[1] / "unit" / "sglang" / "sglang_0_5_23.json").read_text())


def unknown_fields(kind: str, body: dict[str, Any]) -> list[str]:
    """Fields that SGLang's request type does not have."""
    return sorted(set(body) - set(KNOWN["requests"][kind]))


def request_of(body: dict[str, Any], version: int) -> GenerateRequest:
    """What the embedded engine is asked."""
    params = body["sampling_params"]
    return GenerateRequest(
        body["rid"],
        tuple(body["input_ids"]),
        SamplingParams(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(0, params["top_k"]),
            max_new_tokens=params["max_new_tokens"],
            stop_token_ids=tuple(params["stop_token_ids"]),
            seed=params["sampling_seed"],
            top_logprobs_num=body["top_logprobs_num"],
            return_routing=body["return_routed_experts"],
            return_selection=body.get("return_indexer_topk", False),
        ),
        version,
    )


def answer_of(
    completion: Completion,
    request: GenerateRequest,
    *,
    weight_version: str,
    scores: tuple[float, ...] | None,
    flat: bool,
) -> dict[str, Any]:
    """The answer of /generate."""
    rows = len(completion.tokens)
    meta: dict[str, Any] = {
        "id": completion.request_id,
        "finish_reason": _finish(completion),
        "prompt_tokens": len(request.tokens),
        "completion_tokens": rows,
        "weight_version": weight_version,
        "input_token_logprobs": [],
        "output_token_logprobs": _triples(completion.logprobs, completion.tokens),
        "output_token_logprobs_length": rows,
    }
    if scores is not None:
        meta["input_token_logprobs"] = [
            [score, token, None] for score, token in zip((None, *scores), request.tokens, strict=True)
        ]
    if request.params.top_logprobs_num:
        meta |= _flat(completion) if flat else _nested(completion)
    if completion.routing is not None:
        meta["routed_experts"] = _base64(completion.routing.astype("<i4"))
    if completion.selection is not None:
        inputs = len(request.tokens) + rows - 1
        meta["indexer_topk"] = _base64(to_positions(completion.selection, inputs).astype("<i4"))
    return {"text": "", "output_ids": completion.tokens.tolist(), "meta_info": meta}


def _finish(completion: Completion) -> dict[str, Any]:
    if completion.finish is FinishReason.STOP:
        return {"type": "stop", "matched": int(completion.tokens[-1])}
    if completion.finish is FinishReason.LENGTH:
        return {"type": "length", "length": len(completion.tokens)}
    return {"type": "abort", "message": "Aborted"}


def _triples(values: np.ndarray, ids: np.ndarray) -> list[list[Any]]:
    return [[float(value), int(token), None] for value, token in zip(values, ids, strict=True)]


def _nested(completion: Completion) -> dict[str, Any]:
    rows = zip(completion.top_logprobs, completion.top_ids, strict=True)
    return {"output_top_logprobs": [_triples(values, ids) for values, ids in rows]}


def _flat(completion: Completion) -> dict[str, Any]:
    return {
        "output_top_logprobs_val_flat_b64": _base64(completion.top_logprobs.astype("<f4")),
        "output_top_logprobs_idx_flat_b64": _base64(completion.top_ids.astype("<i4")),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
        "output_top_logprobs_shape": list(completion.top_ids.shape),
        "output_top_logprobs_null_prefix": 0,
    }


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
