"""The large parts of an answer, read without a Python object per number.

An answer of 4,096 tokens with 128 candidates and 93 layers of routing is some 60 MB of JSON, of which all but a few
kilobytes are two kinds of value: arrays of `[log-prob, id, null]` and base64 text. Both are cut out of the bytes
first, the rest goes through orjson, and the parts are turned into arrays by C code.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ARRAY_KEYS = (b"output_top_logprobs", b"output_token_logprobs")
TEXT_KEYS = (
    b"routed_experts",
    b"indexer_topk",
    b"output_top_logprobs_val_flat_b64",
    b"output_top_logprobs_idx_flat_b64",
)
_MIN_CUT_BYTES = 4096
"""Shorter values stay where they are: orjson is faster than a cut."""
_TRANSLATE = bytes.maketrans(b"]", b"\n")


class BulkError(ValueError):
    """A part that is not what its name says: names the part and what was found."""


@dataclass(frozen=True, slots=True)
class Split:
    """An answer in two pieces."""

    rest: bytes
    """JSON in which every cut value is null."""
    parts: dict[str, memoryview]
    """Key → its raw bytes: an array's text with its brackets, or base64 without quotes."""


def split(body: bytes) -> Split:
    """Cut the large values out of an answer. Keys inside strings are never mistaken: their quotes are escaped."""
    spans = []
    for name in ARRAY_KEYS:
        spans += _array_span(body, name)
    for name in TEXT_KEYS:
        spans += _text_span(body, name)
    view, at = memoryview(body), 0
    pieces: list[memoryview | bytes] = []
    parts: dict[str, memoryview] = {}
    for key, first, last, keep in sorted(spans, key=lambda s: s[1]):
        if key in parts:
            raise BulkError(f"{key} occurs twice in the answer: one request must have one answer")
        pieces += [view[at:first], b"null"]
        parts[key] = view[keep[0] : keep[1]]
        at = last
    return Split(b"".join([*pieces, view[at:]]), parts)


def _array_span(body: bytes, key: bytes) -> list[tuple[str, int, int, tuple[int, int]]]:
    spans, marker, at = [], b'"' + key + b'":[', 0
    while (found := body.find(marker, at)) >= 0:
        first = found + len(marker) - 1
        # the array holds numbers, null and brackets only: it ends before the next quote or closing brace
        ends = [end for end in (body.find(b'"', first), body.find(b"}", first)) if end >= 0]
        if not ends:
            raise BulkError(f"{key.decode()} is cut off after {len(body) - first} bytes")
        last = body.rfind(b"]", first, min(ends)) + 1
        if not last:
            raise BulkError(f"{key.decode()} has no closing bracket")
        if last - first >= _MIN_CUT_BYTES:
            spans.append((key.decode(), first, last, (first, last)))
        at = last
    return spans


def _text_span(body: bytes, key: bytes) -> list[tuple[str, int, int, tuple[int, int]]]:
    spans, marker, at = [], b'"' + key + b'":"', 0
    while (found := body.find(marker, at)) >= 0:
        begin = found + len(marker)
        end = body.find(b'"', begin)
        if end < 0:
            raise BulkError(f"{key.decode()} is cut off after {len(body) - begin} bytes")
        if end - begin >= _MIN_CUT_BYTES:
            spans.append((key.decode(), begin - 1, end + 1, (begin, end)))
        at = end
    return spans


def triples(part: memoryview | Sequence[object], key: str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """(log-probs `[N]` fp32, ids `[N]`) of an array of `[log-prob, id, null]`, however deeply nested.

    A null log-prob (how JSON writes NaN and infinities) comes back as NaN: the caller knows which token it belongs to.
    """
    if not isinstance(part, memoryview):
        return _triples_of_lists(part, key)
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.csv as csv  # type: ignore[import-untyped]

    # every "]" ends a line, "[" and the letters of null vanish: lines ",log-prob,id," and empty ones
    text = b"," + part.tobytes().translate(_TRANSLATE, b"[nul")
    try:
        table = csv.read_csv(
            pa.py_buffer(text),
            read_options=csv.ReadOptions(use_threads=False, column_names=["a", "logprob", "id", "b"]),
            parse_options=csv.ParseOptions(quote_char=False, escape_char=False),
            convert_options=csv.ConvertOptions(
                column_types={"logprob": pa.float64(), "id": pa.int32()}, include_columns=["logprob", "id"]
            ),
        )
    except pa.ArrowInvalid as error:
        raise BulkError(f"{key} is not an array of [log-prob, id, null]: {error}") from error
    ids = table["id"]
    if ids.null_count:
        raise BulkError(f"{key} has {ids.null_count} candidates without a token id")
    # through fp64: the text is the shortest for a double, and the double is an fp32 value
    values: NDArray[np.float32] = table["logprob"].to_numpy().astype(np.float32)
    return values, ids.to_numpy()


def _triples_of_lists(nested: Sequence[object], key: str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The same for a short array that orjson has already turned into lists."""
    try:
        array = np.array(nested, dtype=object)
        if array.size == 0:
            return np.zeros(0, np.float32), np.zeros(0, np.int32)
        rows = array.reshape(-1, array.shape[-1])
        return rows[:, 0].astype(np.float32), rows[:, 1].astype(np.int32)
    except (ValueError, TypeError, IndexError) as error:
        raise BulkError(f"{key} is not an array of [log-prob, id, null]: {error}") from error


def from_base64(part: memoryview | str, dtype: type[np.generic], key: str) -> NDArray[np.generic]:
    """A flat little-endian array."""
    try:
        data = binascii.a2b_base64(part) if isinstance(part, memoryview) else base64.b64decode(part, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BulkError(f"{key} is not base64: {error}") from error
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise BulkError(f"{key} has {len(data)} bytes, no multiple of {size}")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))
