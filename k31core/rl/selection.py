"""The DSA selection of one completion, for indexer replay: which earlier tokens each token attended. Torch-free.

A token with at most `topk` keys attends all of them, so only later tokens are recorded, with one bit a key instead of
four bytes a selected key: 512 bytes a token and layer at 4,096 tokens and top-2048, where int32 lists take 8,192.

Legend: N tokens that were an input (P + R - 1), M layers with an indexer, W = ceil(N / 8).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class SelectionError(ValueError):
    """A recorded selection that does not belong to its tokens or to the model: names the values that disagree."""


@dataclass(frozen=True, slots=True)
class SelectedKeys:
    """Which tokens of its own sequence each token attended, in every layer with an indexer."""

    bits: NDArray[np.uint8]
    """`[max(0, N - topk), M, W]`: row r is token topk + r; bit j of a row, lowest first, says that it attended token
    j."""
    topk: int


def selection_shape(inputs: int, layers: int, topk: int) -> tuple[int, int, int]:
    """Shape of `SelectedKeys.bits` for `inputs` tokens."""
    return max(0, inputs - topk), layers, -(-inputs // 8)


def check_selection(keys: SelectedKeys, *, inputs: int, layers: int, topk: int) -> None:
    """Raise `SelectionError` unless every row names exactly `topk` tokens, none of them later than its own.

    A bit cannot be set twice, so a token that was named twice shows as a row of too few.
    """
    if keys.topk != topk:
        raise SelectionError(f"was recorded with top-k {keys.topk}, the model has {topk}")
    expected = selection_shape(inputs, layers, topk)
    if keys.bits.shape != expected or keys.bits.dtype != np.uint8:
        raise SelectionError(
            f"is {keys.bits.dtype} of shape {list(keys.bits.shape)}, expected uint8 [inputs past the first {topk}, "
            f"indexer layers, bytes of {inputs} bits] = {list(expected)}"
        )
    rows = np.arange(topk, max(topk, inputs))
    later = keys.bits & ~_up_to(rows, expected[2])[:, None]
    if later.any():
        row, layer, byte = (int(i) for i in np.argwhere(later)[0])
        bit = int(np.flatnonzero(np.unpackbits(later[row, layer, byte], bitorder="little"))[0])
        raise SelectionError(f"row {topk + row}, indexer layer {layer} names token {8 * byte + bit}, later than itself")
    counts = np.bitwise_count(keys.bits).sum(-1, dtype=np.int64)
    if (counts != topk).any():
        row, layer = (int(i) for i in np.argwhere(counts != topk)[0])
        raise SelectionError(
            f"row {topk + row}, indexer layer {layer} names {counts[row, layer]} different tokens, expected {topk}"
        )


def from_positions(positions: NDArray[np.integer], topk: int) -> SelectedKeys:
    """Pack int `[N, M, topk]` lists of positions in the own sequence, -1 for none, in any order.

    Raises `SelectionError` for a position twice in a row, outside 0 .. the row's own, or a row of the wrong length:
    row i has min(i + 1, topk) of them.
    """
    inputs, layers, width = positions.shape
    if width != topk:
        raise SelectionError(f"has {width} entries a row, the model's top-k is {topk}")
    own = np.arange(inputs)[:, None, None]
    bad = (positions < -1) | (positions > own)
    if bad.any():
        row, layer, slot = (int(i) for i in np.argwhere(bad)[0])
        raise SelectionError(
            f"row {row}, indexer layer {layer} names token {positions[row, layer, slot]}; it can attend 0 to {row}"
        )
    ordered = np.sort(positions, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        row, layer, slot = (int(i) for i in np.argwhere(twice)[0])
        raise SelectionError(f"row {row}, indexer layer {layer} names token {ordered[row, layer, slot]} twice")
    counts = (positions >= 0).sum(-1)
    wrong = counts != np.minimum(own[..., 0] + 1, topk)
    if wrong.any():
        row, layer = (int(i) for i in np.argwhere(wrong)[0])
        raise SelectionError(
            f"row {row}, indexer layer {layer} names {counts[row, layer]} tokens, expected {min(row + 1, topk)}"
        )
    shape = selection_shape(inputs, layers, topk)
    bits = np.zeros((*shape[:2], inputs), dtype=bool)
    np.put_along_axis(bits, positions[inputs - shape[0] :], True, axis=-1)
    return SelectedKeys(np.packbits(bits, axis=-1, bitorder="little"), topk)


def to_positions(keys: SelectedKeys, inputs: int) -> NDArray[np.int32]:
    """The inverse of `from_positions`: int32 `[N, M, topk]`, rising, then -1."""
    rows, layers, _ = keys.bits.shape
    positions = np.full((inputs, layers, keys.topk), -1, dtype=np.int32)
    early = np.arange(min(inputs, keys.topk))
    positions[: len(early), :, : len(early)] = np.where(early <= early[:, None], early, -1)[:, None]
    chosen = np.unpackbits(keys.bits, axis=-1, bitorder="little")
    if rows:
        positions[keys.topk :] = np.nonzero(chosen)[2].reshape(rows, layers, keys.topk)
    return positions


def joined(pieces: Sequence[NDArray[np.uint8]], *, inputs: int, layers: int, topk: int) -> SelectedKeys:
    """One record of packed pieces `[n, M, w]` of consecutive tokens from `topk` on; each may have its own width."""
    width = selection_shape(inputs, layers, topk)[2]
    parts = [np.zeros((0, layers, width), dtype=np.uint8)]
    for piece in pieces:
        kept = piece[..., :width]
        parts.append(np.pad(kept, ((0, 0), (0, 0), (0, width - kept.shape[-1]))))
    return SelectedKeys(np.concatenate(parts), topk)


def _up_to(tokens: NDArray[np.integer], width: int) -> NDArray[np.uint8]:
    """u8 `[n, width]`: the bits 0 .. token of every row set."""
    set_ = np.clip(tokens[:, None] + 1 - 8 * np.arange(width)[None], 0, 8)
    masks: NDArray[np.uint8] = ((1 << set_) - 1).astype(np.uint8)
    return masks
