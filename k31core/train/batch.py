"""Samples into packed microbatches: which samples go together, and the columns of one microbatch.

Legend: T packed tokens of a microbatch (all CP chunks), N loss rows, K candidates, L decoder layers, k experts a token,
M layers with an indexer, W bytes of a row of selected keys.

A sample takes P + R consecutive tokens. Row P - 1 + j is the one whose hidden state predicts response token j. The last
response token is an input like the others (its row predicts nothing and has no recorded routing).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from k31core.parallel.mesh import SINGLE, Mesh
from k31core.rl.loss_records import TokenOrigin
from k31core.train.samples import SampleError, SampleLimits, TrainSample, check_sample


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed forward and backward. Loss rows are in packed order."""

    tokens: Tensor
    """int64 `[T]`."""
    cu_seqlens: Tensor
    """int64 `[n + 1]`, from 0 to T of all CP chunks; padding is a sequence of its own at the end."""
    routing: Tensor | None
    """int16 `[T, L, k]`; the last row of every sample and padding hold experts 0..k-1, which no loss depends on."""
    selection: Tensor | None
    """uint8 `[T, M, W]`: keys to attend (see `Packed`); rows of zeros where a token attends all it can, and in the
    last row of every sample and in padding, which select live."""
    rows: Tensor
    """int64 `[N]`: index into `tokens` of the hidden state that predicts each loss token."""
    labels: Tensor
    """int64 `[N]`."""
    sampler_logprobs: Tensor
    """fp32 `[N]`."""
    candidate_ids: Tensor
    """int64 `[N, K]`; -1 is unused."""
    candidate_logprobs: Tensor
    """fp32 `[N, K]`."""
    advantages: Tensor
    """fp32 `[N]`."""
    mask: Tensor
    """bool `[N]`: off for masked samples."""
    origin: TokenOrigin

    def to(self, device: torch.device) -> "Microbatch":
        """The same columns on `device`."""
        moved = {name: value.to(device) for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        origin = TokenOrigin(self.origin.sample_ids, self.origin.sample.to(device), self.origin.position.to(device))
        return replace(self, **moved, origin=origin)


def pack_plan(lengths: Sequence[int], capacity: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Sample indices of every microbatch: at most `capacity` tokens each, their number a multiple of `multiple_of`.

    Longest first into the least loaded microbatch (ties: the first), with as few microbatches as that fits; inside
    one, samples keep their order. The plan depends on the lengths alone. A microbatch may stay empty when there are
    fewer samples than `multiple_of`.
    """
    longest = max(lengths, default=0)
    if longest > capacity:
        raise SampleError(f"a sample of {longest} tokens does not fit a microbatch of {capacity} tokens")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // capacity))
    count = -(-count // multiple_of) * multiple_of
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        loads = [0] * count
        for i in order:
            target = loads.index(min(loads))
            bins[target].append(i)
            loads[target] += lengths[i]
        if max(loads) <= capacity:
            return [sorted(members) for members in bins]
        count += multiple_of


def make_microbatches(
    samples: Sequence[TrainSample], limits: SampleLimits, *, mesh: Mesh = SINGLE, tokens_per_gpu: int
) -> list[Microbatch]:
    """Check every sample, pack all of them, and return this DP rank's microbatches (equally many on every rank).

    Columns are still those of all CP chunks: see `own_chunk`. Raises `SampleError` naming the sample.
    """
    seen: set[str] = set()
    for sample in samples:
        if sample.sample_id in seen:
            raise SampleError(f"sample {sample.sample_id} appears twice in the rollout")
        seen.add(sample.sample_id)
        check_sample(sample, limits)
    capacity = tokens_per_gpu * mesh.cp.size
    plan = pack_plan([sample.tokens for sample in samples], capacity, multiple_of=mesh.dp.size)
    mine = plan[mesh.dp.rank :: mesh.dp.size]
    return [pack([samples[i] for i in members], limits, token_multiple=mesh.token_multiple) for members in mine]


def loss_token_count(samples: Sequence[TrainSample]) -> int:
    """N of the whole step: every rank reads the whole rollout, so no collective is needed."""
    return sum(sample.loss_tokens for sample in samples)


def pack(samples: Sequence[TrainSample], limits: SampleLimits, *, token_multiple: int = 1) -> Microbatch:
    """The columns of one microbatch; padded with a sequence of zeros to a multiple of `token_multiple`."""
    total = sum(sample.tokens for sample in samples)
    padding = -total % token_multiple or (token_multiple if total == 0 else 0)
    lengths = [sample.tokens for sample in samples] + ([padding] if padding else [])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.zeros(total + padding, dtype=np.int64)
    rows, position, which = [], [], []
    for index, sample in enumerate(samples):
        begin, prompt, response = bounds[index], len(sample.prompt), len(sample.response)
        tokens[begin : begin + prompt] = sample.prompt
        tokens[begin + prompt : begin + prompt + response] = sample.response
        rows.append(begin + prompt - 1 + np.arange(response))
        position.append(np.arange(response))
        which.append(np.full(response, index))
    wide = limits.candidates
    return Microbatch(
        tokens=torch.from_numpy(tokens),
        cu_seqlens=torch.from_numpy(bounds),
        routing=_routing(samples, bounds, limits) if limits.replay_routing else None,
        selection=_selection(samples, bounds, limits) if limits.replay_selection else None,
        rows=_column(rows, np.int64),
        labels=_column([s.response for s in samples], np.int64),
        sampler_logprobs=_column([s.logprobs for s in samples], np.float32),
        candidate_ids=_column([_widened(s.top_ids, wide, -1) for s in samples], np.int64, wide),
        candidate_logprobs=_column([_widened(s.top_logprobs, wide, -np.inf) for s in samples], np.float32, wide),
        advantages=_column([np.full(len(s.response), s.advantage) for s in samples], np.float32),
        mask=_column([np.full(len(s.response), not s.masked) for s in samples], np.bool_),
        origin=TokenOrigin(tuple(s.sample_id for s in samples), _column(which, np.int64), _column(position, np.int64)),
    )


def own_chunk(batch: Microbatch, mesh: Mesh) -> Microbatch:
    """The part of one CP rank: its tokens, what they replay, and the loss rows among them (counted from its start).

    `cu_seqlens` stays that of all chunks. A response may continue in the next chunk: labels travel with the rows.
    """
    if mesh.cp.size == 1:
        return batch
    start, length = mesh.cp.slice_of(len(batch.tokens), "packed tokens")
    keep = (batch.rows >= start) & (batch.rows < start + length)
    columns = ("labels", "sampler_logprobs", "candidate_ids", "candidate_logprobs", "advantages", "mask")
    return replace(
        batch,
        tokens=batch.tokens[start : start + length],
        routing=None if batch.routing is None else batch.routing[start : start + length],
        selection=None if batch.selection is None else batch.selection[start : start + length],
        rows=batch.rows[keep] - start,
        origin=TokenOrigin(batch.origin.sample_ids, batch.origin.sample[keep], batch.origin.position[keep]),
        **{name: getattr(batch, name)[keep] for name in columns},
    )


def _routing(samples: Sequence[TrainSample], bounds: np.ndarray, limits: SampleLimits) -> Tensor:
    rows = np.empty((bounds[-1], limits.num_layers, limits.experts_per_token), dtype=np.int16)
    rows[:] = np.arange(limits.experts_per_token, dtype=np.int16)
    for sample, begin in zip(samples, bounds):
        assert sample.routing is not None
        rows[begin : begin + sample.tokens - 1] = sample.routing
    return torch.from_numpy(rows)


def _selection(samples: Sequence[TrainSample], bounds: np.ndarray, limits: SampleLimits) -> Tensor:
    width = max((-(-(sample.tokens - 1) // 8) for sample in samples), default=0)
    bits = np.zeros((bounds[-1], limits.index_layers, width), dtype=np.uint8)
    for sample, begin in zip(samples, bounds):
        assert sample.selection is not None
        recorded = sample.selection.bits
        first = begin + sample.tokens - 1 - len(recorded)
        bits[first : first + len(recorded), :, : recorded.shape[2]] = recorded
    return torch.from_numpy(bits)


def _widened(values: np.ndarray, width: int, fill: float) -> np.ndarray:
    """`[R, K']` with columns of `fill` up to `width` (filtered sampling records as many words as could be drawn)."""
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def _column(parts: Sequence[np.ndarray], dtype: type, width: int | None = None) -> Tensor:
    if not parts:
        return torch.from_numpy(np.empty((0,) if width is None else (0, width), dtype=dtype))
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False))
