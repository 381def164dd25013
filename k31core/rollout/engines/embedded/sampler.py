"""Drawing tokens: temperature, top-k, top-p, one uniform a token, and the log-probs of what could have been drawn.

Everything is computed row by row in an order that does not depend on the other rows.

Legend: B rows, V vocabulary, K recorded candidates.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k31core.ops.logprobs import topk_logprobs
from k31core.rl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, on the host."""

    tokens: NDArray[np.int64]
    """`[B]`."""
    logprobs: NDArray[np.float32]
    """`[B]` log q of the token among everything that could have been drawn; temperature 1 for greedy rows."""
    top_ids: NDArray[np.int32]
    """`[B, K]` best first, equal ones by smaller id; K is the largest count of the batch."""
    top_logprobs: NDArray[np.float32]
    """`[B, K]`."""
    counts: NDArray[np.int64]
    """`[B]` candidates to keep of each row: its K, or its whole support when the sampling is filtered."""


def draw(logits: Tensor, params: list[SamplingParams], uniforms: NDArray[np.float64]) -> Drawn:
    """Sample row i of `logits` (fp32 `[n, V]`, rows past B are padding) with `params[i]` and its draw in [0, 1)."""
    count = len(params)
    vocab = logits.shape[1]
    temperature = _column([p.temperature or 1.0 for p in params], logits)
    scaled = logits[:count] / temperature
    filtered = [p.top_k > 0 or p.top_p < 1.0 for p in params]
    if any(filtered):
        scaled = _filter(scaled, params)
    logprobs = torch.log_softmax(scaled, dim=-1)
    greedy = [p.temperature == 0.0 for p in params]
    tokens = _invert(logprobs, torch.from_numpy(uniforms).to(logits.device))
    if any(greedy):
        best = torch.sort(scaled, dim=-1, descending=True, stable=True).indices[:, 0]
        tokens = torch.where(torch.tensor(greedy, device=logits.device), best, tokens)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    counts = np.array([min(p.top_logprobs_num, vocab) for p in params], dtype=np.int64)
    support = np.array([p.top_logprobs_num > 0 and _support_mode(p) for p in params])
    if support.any():
        sizes = torch.isfinite(logprobs).sum(-1).cpu().numpy()
        counts = np.where(support, sizes, counts)
    width = int(counts.max(initial=0))
    ids, values = topk_logprobs(scaled, width) if width else (tokens[:, None][:, :0], chosen[:, None][:, :0])
    return Drawn(
        tokens.cpu().numpy(),
        chosen.cpu().numpy(),
        ids.to(torch.int32).cpu().numpy(),
        values.to(torch.float32).cpu().numpy(),
        counts,
    )


def _support_mode(params: SamplingParams) -> bool:
    """Filtered sampling records its whole support, as the recipe's `candidate_mode` expects; greedy has none."""
    return params.temperature not in (0.0, 1.0) or params.top_p < 1.0 or params.top_k > 0


def _filter(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """-inf for words outside top-k, then outside the smallest set of the rest whose probability reaches top-p."""
    vocab = scaled.shape[1]
    order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=scaled.device)
    limit = torch.tensor([[p.top_k or vocab] for p in params], device=scaled.device)
    kept = order.values.masked_fill(rank >= limit, float("-inf"))
    probability = torch.softmax(kept.double(), dim=-1)
    before = probability.cumsum(-1) - probability
    # top-p 1 keeps everything: a cumulative sum can reach 1 before the last word
    top_p = torch.tensor([[p.top_p if p.top_p < 1.0 else float("inf")] for p in params], device=scaled.device)
    kept = kept.masked_fill((before >= top_p) & (rank > 0), float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order.indices, kept)


def _invert(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """int64 `[B]`: the first word whose cumulative probability (fp64) exceeds the draw times the total."""
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    return (cumulative <= target).sum(-1).clamp(max=logprobs.shape[1] - 1)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
