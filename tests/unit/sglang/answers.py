"""Answers of /generate as SGLang writes them, from arrays, one value at a time."""

import base64
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engines.sglang.payload import ModelShape

SHAPE = ModelShape(vocab_size=500, num_layers=3, num_experts=16, experts_per_token=2)
VERSION = "k31-v4-1-abc"


@dataclass(frozen=True)
class Made:
    """An answer's content, to be compared with what is decoded."""

    request: GenerateRequest
    shape: ModelShape
    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    routing: np.ndarray


def make(rows: int, k: int, prompt: int, *, shape: ModelShape = SHAPE, seed: int = 0) -> Made:
    """Random but consistent: probabilities sum below 1, the sampled token is often among the candidates."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, k + 1)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    top = -np.sort(-logprobs[:, :k], axis=1).astype(np.float32)
    ids = np.stack([rng.choice(shape.vocab_size, k, replace=False) for _ in range(rows)]) if rows else np.zeros((0, k))
    ids = ids.astype(np.int32)
    pick = rng.integers(0, k, rows)
    tokens = ids[np.arange(rows), pick].astype(np.int32)
    routing = rng.integers(0, shape.num_experts, (prompt + rows - 1, shape.num_layers, shape.experts_per_token))
    params = SamplingParams(1.0, 1.0, 0, rows, (), seed=1, top_logprobs_num=k, return_routing=True)
    request = GenerateRequest("3-1-2", tuple(range(prompt)), params, 4)
    return Made(request, shape, tokens, top[np.arange(rows), pick], ids, top, routing.astype(np.int16))


def text_of(made: Made, *, flat: bool, **changes: Any) -> bytes:
    """The answer's JSON; `changes` replace entries of meta_info (`output_ids` too)."""
    rows, k = made.top_ids.shape
    meta: dict[str, Any] = {
        "id": "3-1-2.0",
        "finish_reason": {"type": "length", "length": rows},
        "prompt_tokens": len(made.request.tokens),
        "weight_version": VERSION,
        "completion_tokens": rows,
        "input_token_logprobs": [],
        "output_token_logprobs": [[float(p), int(t), None] for p, t in zip(made.logprobs, made.tokens, strict=True)],
        "routed_experts": encoded(made.routing.astype("<i4")),
    }
    if flat:
        meta |= {
            "output_top_logprobs_val_flat_b64": encoded(made.top_logprobs.astype("<f4")),
            "output_top_logprobs_idx_flat_b64": encoded(made.top_ids.astype("<i4")),
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_shape": [rows, k],
            "output_top_logprobs_null_prefix": 0,
        }
    else:
        meta["output_top_logprobs"] = [
            [[float(p), int(t), None] for p, t in zip(row, ids, strict=True)]
            for row, ids in zip(made.top_logprobs, made.top_ids, strict=True)
        ]
    ids = changes.pop("output_ids", made.tokens.tolist())
    tree = {"text": 'a "output_top_logprobs":[ in a text', "output_ids": ids, "meta_info": meta | changes}
    return orjson.dumps(tree)  # NaN becomes null, as in SGLang


def encoded(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def with_stop(made: Made) -> Made:
    """The same, ended by its last token."""
    params = replace(made.request.params, stop_token_ids=(int(made.tokens[-1]),))
    return replace(made, request=replace(made.request, params=params))
