"""Selected keys as bits: lists in any order come back, and every record that does not fit is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k31core.rl.selection import (
    SelectedKeys,
    SelectionError,
    check_selection,
    from_positions,
    joined,
    selection_shape,
    to_positions,
)


def random_positions(inputs: int, layers: int, topk: int, seed: int) -> np.ndarray:
    """What an engine sends: the positions of every row in random order, unused entries anywhere."""
    rng = np.random.default_rng(seed)
    out = np.full((inputs, layers, topk), -1, dtype=np.int32)
    for row in range(inputs):
        for layer in range(layers):
            count = min(row + 1, topk)
            out[row, layer, :count] = rng.permutation(row + 1)[:count]
            rng.shuffle(out[row, layer])
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 3), st.integers(1, 20), st.integers(0, 1000))
def test_lists_come_back_in_order(inputs: int, layers: int, topk: int, seed: int) -> None:
    positions = random_positions(inputs, layers, topk, seed)
    keys = from_positions(positions, topk)
    assert keys.bits.shape == selection_shape(inputs, layers, topk)
    check_selection(keys, inputs=inputs, layers=layers, topk=topk)
    high = np.where(positions < 0, inputs, positions)
    expected = np.sort(high, axis=-1)
    assert np.array_equal(to_positions(keys, inputs), np.where(expected == inputs, -1, expected))
    cuts = sorted({0, len(keys.bits) // 3, len(keys.bits) // 2, len(keys.bits)})
    pieces = [keys.bits[a:b] for a, b in itertools.pairwise(cuts)]
    again = joined(pieces, inputs=inputs, layers=layers, topk=topk)
    assert np.array_equal(again.bits, keys.bits)


def test_a_record_is_a_bit_a_key() -> None:
    keys = from_positions(random_positions(40, 2, 8, 0), 8)
    assert keys.bits.nbytes == 32 * 2 * 5


def edited(bits: np.ndarray, index: tuple[int, ...], value: int) -> np.ndarray:
    bits = bits.copy()
    bits[index] = value
    return bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], r"shape \[5, 2, 2\], expected .* = \[6, 2, 2\]"),
        (lambda b: np.concatenate([b, b[:1]]), r"shape \[7, 2, 2\]"),
        (lambda b: b[:, :1], r"shape \[6, 1, 2\]"),
        (lambda b: b[..., :1], r"shape \[6, 2, 1\]"),
        (lambda b: b.astype(np.int16), "is int16"),
        (lambda b: edited(b, (1, 1, 1), 0x80), "row 5, indexer layer 1 names token 15, later than itself"),
        (lambda b: edited(b, (5, 0), 0), "row 9, indexer layer 0 names 0 different tokens, expected 4"),
        (lambda b: edited(b, (0, 0, 0), 0x1F), "row 4, indexer layer 0 names 5 different tokens, expected 4"),
        (lambda b: edited(b, (0, 0, 0), 0x2F), "row 4, indexer layer 0 names token 5, later than itself"),
    ],
)
def test_bits_that_do_not_fit_are_refused(change, message: str) -> None:
    keys = from_positions(random_positions(10, 2, 4, 3), 4)
    with pytest.raises(SelectionError, match=message):
        check_selection(dataclasses.replace(keys, bits=change(keys.bits)), inputs=10, layers=2, topk=4)


def test_another_top_k_is_refused() -> None:
    with pytest.raises(SelectionError, match="top-k 4, the model has 5"):
        check_selection(SelectedKeys(np.zeros((0, 2, 1), np.uint8), 4), inputs=3, layers=2, topk=5)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        ((6, 1, 0), [3, 3, 2, 1], "row 6, indexer layer 1 names token 3 twice"),
        ((6, 1, 0), [0, 1, 2, 7], "row 6, indexer layer 1 names token 7; it can attend 0 to 6"),
        ((6, 1, 0), [0, 1, 2, -2], "names token -2"),
        ((6, 0, 0), [0, 1, 2, -1], "row 6, indexer layer 0 names 3 tokens, expected 4"),
        ((1, 0, 0), [0, -1, -1, -1], "row 1, indexer layer 0 names 1 tokens, expected 2"),
    ],
)
def test_lists_that_do_not_fit_are_refused(index: tuple[int, ...], value: list[int], message: str) -> None:
    positions = random_positions(9, 2, 4, 1)
    positions[index[:2]] = value
    with pytest.raises(SelectionError, match=message):
        from_positions(positions, 4)
    with pytest.raises(SelectionError, match="3 entries a row, the model's top-k is 4"):
        from_positions(positions[..., :3], 4)
