"""A step's groups as columns on disk: `samples.safetensors` (numbers) and `samples.json` (names, labels, verdicts).
No torch.

Legend: G groups, N samples, P and R prompt and response tokens (sums over groups or samples below), K candidates, L
layers, k experts a token. Offsets are int64 and have one entry more than there are parts.

    prompt_tokens i32 [P]          prompt_offsets [G + 1]
    response_tokens i32 [R]        response_offsets [N + 1]      logprobs f32 [R]
    top_ids i32 [R, K] (-1 unused) top_logprobs f32 [R, K] (0 where unused: a committed file holds finite numbers only)
    routing i16 [P' + R - N, L, k] routing_offsets [N + 1]       P' counts a prompt once for each of its samples
    selection u8 [bytes]           selection_offsets [N + 1]     bits of `SelectedKeys`, sample after sample
    selection_shape i64 [2]        layers with an indexer, top-k
    rewards f32 [N]                group i32 [N]
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from k31core.rl.selection import SelectedKeys, SelectionError, check_selection, selection_shape
from k31core.rl.types import Completion, FinishReason, GradeReason, Group, Prompt, Sample, Verdict

COLUMNS_FILE = "samples.safetensors"
NAMES_FILE = "samples.json"
FORMAT = 1
_DTYPES = {
    "prompt_tokens": np.int32,
    "prompt_offsets": np.int64,
    "response_tokens": np.int32,
    "response_offsets": np.int64,
    "logprobs": np.float32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "rewards": np.float32,
    "group": np.int32,
}
_ROUTING = {"routing": np.int16, "routing_offsets": np.int64}
_SELECTION = {"selection": np.uint8, "selection_offsets": np.int64, "selection_shape": np.int64}

Columns = dict[str, NDArray[Any]]


class RecordError(ValueError):
    """Samples that do not fit together, or a file that does not hold them: names the file or sample and the lengths."""


def write_groups(directory: Path, groups: Sequence[Group]) -> list[Path]:
    """Write the groups into `directory` (the caller commits it); returns the files. Raises RecordError."""
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        check_completion(sample)
    routed = [sample.completion.routing is not None for sample in samples]
    if any(routed) and not all(routed):
        raise RecordError(f"sample {samples[routed.index(False)].sample_id} has no routing, others have")
    _check_same_selection(samples)
    completions = [sample.completion for sample in samples]
    width = max((c.top_ids.shape[1] for c in completions), default=0)
    columns: Columns = {
        "prompt_tokens": _joined([np.asarray(g.prompt.tokens, dtype=np.int32) for g in groups], np.int32),
        "prompt_offsets": _offsets([len(g.prompt.tokens) for g in groups]),
        "response_tokens": _joined([c.tokens for c in completions], np.int32),
        "response_offsets": _offsets([len(c.tokens) for c in completions]),
        "logprobs": _joined([c.logprobs for c in completions], np.float32),
        "top_ids": _joined([_widened(c.top_ids, width, -1) for c in completions], np.int32, width),
        "top_logprobs": _joined([_finite_candidates(c, width) for c in completions], np.float32, width),
        "rewards": np.array([s.reward for s in samples], dtype=np.float32),
        "group": np.array([s.group for s in samples], dtype=np.int32),
    }
    if samples and all(routed):
        parts = [c.routing for c in completions if c.routing is not None]
        columns["routing"] = np.concatenate(parts).astype(np.int16)
        columns["routing_offsets"] = _offsets([len(part) for part in parts])
    columns |= _selection_columns(completions)
    names = {
        "format": FORMAT,
        "groups": [
            {"prompt_id": g.prompt.prompt_id, "label": g.prompt.label, "row": g.prompt.row, "epoch": g.prompt.epoch}
            | {"samples": len(g.samples)}
            for g in groups
        ],
        "samples": [_sample_names(sample) for sample in samples],
    }
    files = [directory / COLUMNS_FILE, directory / NAMES_FILE]
    save_file({name: np.ascontiguousarray(column) for name, column in columns.items()}, files[0])
    files[1].write_text(json.dumps(names, indent=1), encoding="utf-8")
    return files


def read_groups(directory: Path) -> list[Group]:
    """The groups written by `write_groups`; raises RecordError naming the file, column or sample that does not fit."""
    columns, names = _read_columns(directory / COLUMNS_FILE), _read_names(directory / NAMES_FILE)
    expected = _DTYPES | (_ROUTING if "routing" in columns else {}) | (_SELECTION if "selection" in columns else {})
    for name, dtype in expected.items():
        if name not in columns or columns[name].dtype != dtype:
            seen = columns[name].dtype if name in columns else "missing"
            raise RecordError(f"{directory / COLUMNS_FILE}: column {name} is {seen}, expected {np.dtype(dtype)}")
    prompts = _parts(directory, columns, "prompt_offsets", ("prompt_tokens",), len(names["groups"]))
    per_token = ("response_tokens", "logprobs", "top_ids", "top_logprobs")
    count = len(names["samples"])
    responses = _parts(directory, columns, "response_offsets", per_token, count)
    routing = (
        _parts(directory, columns, "routing_offsets", ("routing",), count) if "routing" in columns else [[None]] * count
    )
    selection = (
        _parts(directory, columns, "selection_offsets", ("selection",), count)
        if "selection" in columns
        else [[None]] * count
    )
    if len(columns["rewards"]) != count or len(columns["group"]) != count:
        raise RecordError(f"{directory}: {count} samples, {len(columns['rewards'])} rewards")
    groups: list[Group] = []
    at = 0
    for (tokens,), entry in zip(prompts, names["groups"], strict=True):
        prompt = Prompt(entry["prompt_id"], tuple(tokens.tolist()), entry["label"], entry["row"], entry["epoch"])
        samples = []
        for i in range(at, at + entry["samples"]):
            if i >= count:
                raise RecordError(f"{directory}: group {entry['prompt_id']} has more samples than are recorded")
            completion = _completion(names["samples"][i], responses[i], routing[i][0])
            if (flat := selection[i][0]) is not None:
                keys = _selected_keys(directory, names["samples"][i], prompt, completion, flat, columns)
                completion = replace(completion, selection=keys)
            sample = _sample(names["samples"][i], prompt, completion, columns, i)
            check_completion(sample)
            samples.append(sample)
        at += entry["samples"]
        groups.append(Group(prompt, tuple(samples)))
    if at != count:
        raise RecordError(f"{directory}: the groups hold {at} samples, {count} are recorded")
    return groups


def check_completion(sample: Sample) -> None:
    """Raise RecordError unless every column of a completion has the length its tokens ask for, and finite log-probs."""
    completion, who = sample.completion, f"sample {sample.sample_id}"
    count = len(completion.tokens)
    expected = {
        "logprobs": (completion.logprobs.shape, (count,)),
        "top_ids": (completion.top_ids.shape[:1], (count,)),
        "top_logprobs": (completion.top_logprobs.shape, completion.top_ids.shape),
    }
    if completion.routing is not None:
        rows = len(sample.prompt.tokens) + max(count, 1) - 1
        expected["routing (prompt + response - 1 rows)"] = (completion.routing.shape[:1], (rows,))
    for name, (seen, wanted) in expected.items():
        if seen != wanted:
            raise RecordError(f"{who}: {name} has shape {list(seen)}, expected {list(wanted)}")
    if completion.selection is not None:
        keys = completion.selection
        rows = len(sample.prompt.tokens) + max(count, 1) - 1
        layers = keys.bits.shape[1] if keys.bits.ndim == 3 else 0
        try:
            check_selection(keys, inputs=rows, layers=layers, topk=keys.topk)
        except SelectionError as error:
            raise RecordError(f"{who}: the DSA selection {error}") from error
    if not np.isfinite(completion.logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(completion.logprobs))[0])
        raise RecordError(f"{who}: the log-prob of response token {at} is {completion.logprobs[at]}")
    used = completion.top_ids >= 0
    if not np.isfinite(completion.top_logprobs[used]).all():
        row = int(np.argwhere(used & ~np.isfinite(completion.top_logprobs))[0][0])
        raise RecordError(f"{who}: a candidate of response token {row} has a log-prob that is not finite")


def _check_same_selection(samples: Sequence[Sample]) -> None:
    """All samples have a selection of the same model, or none has."""
    kinds = [None if (keys := s.completion.selection) is None else (keys.bits.shape[1], keys.topk) for s in samples]
    for sample, kind in zip(samples, kinds, strict=True):
        if kind != kinds[0]:
            raise RecordError(
                f"sample {sample.sample_id}: DSA selection of (layers, top-k) {kind}, sample {samples[0].sample_id} "
                f"has {kinds[0]}"
            )


def _selection_columns(completions: Sequence[Completion]) -> Columns:
    recorded = [c.selection for c in completions if c.selection is not None]
    if not recorded:
        return {}
    return {
        "selection": np.concatenate([keys.bits.reshape(-1) for keys in recorded]),
        "selection_offsets": _offsets([keys.bits.size for keys in recorded]),
        "selection_shape": np.array([recorded[0].bits.shape[1], recorded[0].topk], dtype=np.int64),
    }


def _selected_keys(
    directory: Path,
    entry: dict[str, Any],
    prompt: Prompt,
    completion: Completion,
    flat: NDArray[np.uint8],
    columns: Columns,
) -> SelectedKeys:
    layers, topk = (int(value) for value in columns["selection_shape"])
    inputs = len(prompt.tokens) + max(len(completion.tokens), 1) - 1
    shape = selection_shape(inputs, layers, topk)
    if flat.size != math.prod(shape):
        raise RecordError(
            f"{directory / COLUMNS_FILE}: sample {entry['sample_id']} has {flat.size} bytes of selected keys, expected "
            f"{' x '.join(map(str, shape))}"
        )
    return SelectedKeys(flat.reshape(shape), topk)


def _sample_names(sample: Sample) -> dict[str, Any]:
    completion, verdict = sample.completion, sample.verdict
    return {
        "sample_id": sample.sample_id,
        "request_id": completion.request_id,
        "finish": completion.finish.value,
        "policy_version": completion.policy_version,
        "candidates": int(completion.top_ids.shape[1]),
        "verdict": {
            "deepscaler": verdict.deepscaler,
            "math_verify": verdict.math_verify,
            "reason": verdict.reason.value,
            "deepscaler_reason": verdict.deepscaler_reason and verdict.deepscaler_reason.value,
            "math_verify_reason": verdict.math_verify_reason and verdict.math_verify_reason.value,
        },
    }


def _sample(entry: dict[str, Any], prompt: Prompt, completion: Completion, columns: Columns, index: int) -> Sample:
    verdict = entry["verdict"]
    return Sample(
        sample_id=entry["sample_id"],
        prompt=prompt,
        completion=completion,
        reward=float(columns["rewards"][index]),
        verdict=Verdict(
            deepscaler=verdict["deepscaler"],
            math_verify=verdict["math_verify"],
            reason=GradeReason(verdict["reason"]),
            deepscaler_reason=_reason(verdict["deepscaler_reason"]),
            math_verify_reason=_reason(verdict["math_verify_reason"]),
        ),
        group=int(columns["group"][index]),
    )


def _reason(value: str | None) -> GradeReason | None:
    return None if value is None else GradeReason(value)


def _completion(entry: dict[str, Any], parts: list[NDArray[Any]], routing: NDArray[np.int16] | None) -> Completion:
    tokens, logprobs, top_ids, top_logprobs = parts
    return Completion(
        request_id=entry["request_id"],
        tokens=tokens,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=np.where(top_ids >= 0, top_logprobs, np.float32(-np.inf)),
        routing=routing,
        finish=FinishReason(entry["finish"]),
        policy_version=entry["policy_version"],
    )


def _parts(
    directory: Path, columns: Columns, offsets: str, names: tuple[str, ...], count: int
) -> list[list[NDArray[Any]]]:
    """The columns `names` cut at `offsets`: one list of arrays for each of `count` parts."""
    bounds, where = columns[offsets], directory / COLUMNS_FILE
    if bounds.shape != (count + 1,) or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise RecordError(f"{where}: {offsets} must be {count + 1} rising numbers from 0, got shape {bounds.shape}")
    for name in names:
        if len(columns[name]) != bounds[-1]:
            raise RecordError(f"{where}: column {name} has {len(columns[name])} rows, {offsets} says {bounds[-1]}")
    edges = bounds.tolist()
    return [[columns[name][start:end] for name in names] for start, end in itertools.pairwise(edges)]


def _read_columns(path: Path) -> Columns:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path}: cannot be read as safetensors ({error})") from error


def _read_names(path: Path) -> dict[str, Any]:
    try:
        names = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(names, dict) or names.get("format") != FORMAT:
        raise RecordError(f"{path}: not a record of format {FORMAT}")
    return names


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(parts: list[NDArray[Any]], dtype: type, width: int | None = None) -> NDArray[Any]:
    if not parts:
        return np.zeros((0,) if width is None else (0, width), dtype=dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def _widened(values: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    """`values` `[R, K]` with columns of `fill` appended up to `width`."""
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def _finite_candidates(completion: Completion, width: int) -> NDArray[np.float32]:
    """Candidate log-probs with 0 in place of unused entries."""
    used = _widened(completion.top_ids, width, -1) >= 0
    return np.where(used, _widened(completion.top_logprobs, width, 0), np.float32(0))
