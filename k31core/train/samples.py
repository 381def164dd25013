"""What the trainer needs to know of one sample, and the checks that refuse a sample by its id. Torch-free.

Axes: P prompt tokens, R response tokens, K recorded candidates, L decoder layers, k experts a token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k31core.rl.selection import SelectedKeys, SelectionError, check_selection


class SampleError(ValueError):
    """A sample that cannot be trained on: names it, the field, what was seen and what was expected."""


class RoutingError(SampleError):
    """Recorded routing (R3) that does not belong to the sample or to the model."""


class IndexerReplayError(SampleError):
    """A recorded DSA selection that does not belong to the sample or to the model."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A finished answer with its advantage."""

    sample_id: str
    prompt: NDArray[np.int32]
    """`[P]`."""
    response: NDArray[np.int32]
    """`[R]`, the stop token included."""
    logprobs: NDArray[np.float32]
    """`[R]` log q of the sampled tokens."""
    top_ids: NDArray[np.int32]
    """`[R, K]`; -1 is an unused entry."""
    top_logprobs: NDArray[np.float32]
    """`[R, K]`."""
    routing: NDArray[np.int16] | None
    """`[P + R - 1, L, k]`: experts of every token that was an input; None: route live."""
    advantage: float
    selection: SelectedKeys | None = None
    """Keys every token attended in the layers with an indexer; None: select live."""
    masked: bool = False
    """Counted nowhere: neither in the loss nor in its normaliser."""

    @property
    def tokens(self) -> int:
        """P + R: packed tokens."""
        return len(self.prompt) + len(self.response)

    @property
    def loss_tokens(self) -> int:
        """Tokens in the loss and in its normaliser."""
        return 0 if self.masked else len(self.response)


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """What the model and the recipe allow."""

    vocab_size: int
    max_tokens: int
    """Of one packed microbatch over all CP ranks."""
    candidates: int
    """K that every sample must have; with `whole_support`, the most it may have."""
    moe_layers: tuple[int, ...]
    """0-based layers with routed experts."""
    num_layers: int
    num_experts: int
    experts_per_token: int
    replay_routing: bool
    replay_selection: bool = False
    index_layers: int = 0
    """M: layers with an indexer."""
    index_topk: int = 0
    whole_support: bool = False
    """Filtered sampling: a sample records everything that could be drawn, however few words that is."""


def check_sample(sample: TrainSample, limits: SampleLimits) -> None:
    """Raise `SampleError` (or `RoutingError`) for the first thing that is wrong with `sample`."""
    who = f"sample {sample.sample_id}"
    prompt, response = len(sample.prompt), len(sample.response)
    if prompt == 0 or response == 0:
        raise SampleError(f"{who}: {prompt} prompt and {response} response tokens; both must be at least 1")
    if sample.tokens > limits.max_tokens:
        raise SampleError(
            f"{who}: {sample.tokens} tokens do not fit a microbatch of {limits.max_tokens}: "
            "raise train.max_tokens_per_gpu or lower rollout.max_response_tokens"
        )
    recorded = sample.top_ids.shape[-1] if sample.top_ids.ndim else 0
    wide = min(recorded, limits.candidates) if limits.whole_support else limits.candidates
    shapes = {
        "logprobs": (sample.logprobs.shape, (response,)),
        "top_ids": (sample.top_ids.shape, (response, wide)),
        "top_logprobs": (sample.top_logprobs.shape, (response, wide)),
    }
    for name, (seen, expected) in shapes.items():
        if seen != expected:
            raise SampleError(f"{who}: {name} has shape {list(seen)}, expected {list(expected)}")
    if not np.isfinite(sample.advantage):
        raise SampleError(f"{who}: the advantage is {sample.advantage}")
    _check_ids(who, "prompt", sample.prompt, 0, limits.vocab_size)
    _check_ids(who, "response", sample.response, 0, limits.vocab_size)
    _check_ids(who, "top_ids", sample.top_ids, -1, limits.vocab_size)
    twice = _first_duplicate(sample.top_ids, ignore=-1)
    if twice is not None:
        raise SampleError(f"{who}: candidate {twice[1]} is recorded twice at response position {twice[0][0]}")
    if limits.replay_routing:
        check_routing(sample, limits)
    if limits.replay_selection:
        check_selected_keys(sample, limits)


def check_routing(sample: TrainSample, limits: SampleLimits) -> None:
    """Raise `RoutingError` for missing rows, extra rows, an expert twice in a row, or an unknown expert."""
    who = f"sample {sample.sample_id}: routing"
    if sample.routing is None:
        raise RoutingError(f"{who} is missing, but rollout.routing_replay is on: the engine must return it")
    expected = (sample.tokens - 1, limits.num_layers, limits.experts_per_token)
    if sample.routing.shape != expected:
        raise RoutingError(
            f"{who} has shape {list(sample.routing.shape)}, expected [prompt + response - 1, layers, experts a token] "
            f"= {list(expected)}"
        )
    layers = list(limits.moe_layers)
    used = sample.routing[:, layers]
    bad = (used < 0) | (used >= limits.num_experts)
    if bad.any():
        row, layer, slot = (int(i) for i in np.argwhere(bad)[0])
        raise RoutingError(
            f"{who}: row {row}, layer {layers[layer]} names expert {used[row, layer, slot]}; "
            f"experts run from 0 to {limits.num_experts - 1}"
        )
    twice = _first_duplicate(used)
    if twice is not None:
        (row, layer), expert = twice
        raise RoutingError(f"{who}: row {row}, layer {layers[layer]} names expert {expert} twice")


def check_selected_keys(sample: TrainSample, limits: SampleLimits) -> None:
    """Raise `IndexerReplayError` for a missing selection, wrong rows or layers, a later token, or too few tokens."""
    who = f"sample {sample.sample_id}: the DSA selection"
    if sample.selection is None:
        raise IndexerReplayError(f"{who} is missing, but rollout.indexer_replay is on: the engine must return it")
    try:
        check_selection(sample.selection, inputs=sample.tokens - 1, layers=limits.index_layers, topk=limits.index_topk)
    except SelectionError as error:
        raise IndexerReplayError(f"{who} {error}") from error


def _check_ids(who: str, name: str, ids: NDArray[np.int32], low: int, high: int) -> None:
    bad = (ids < low) | (ids >= high)
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise SampleError(f"{who}: {name}{where} is {ids[tuple(where)]}; words run from 0 to {high - 1}")


def _first_duplicate(ids: NDArray[np.integer], ignore: int | None = None) -> tuple[tuple[int, ...], int] | None:
    """(leading index, value) of the first row of the last axis that holds a value twice."""
    ordered = np.sort(ids, axis=-1)
    same = ordered[..., 1:] == ordered[..., :-1]
    if ignore is not None:
        same &= ordered[..., 1:] != ignore
    if not same.any():
        return None
    where = tuple(int(i) for i in np.argwhere(same)[0])
    return where[:-1], int(ordered[where])
