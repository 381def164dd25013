"""What goes into a loss and what comes out, and the checks every loss shares.

Legend: T packed tokens of one microbatch, K recorded candidates. All log-probs are at the rollout temperature; those of
the trainer carry the gradient, everything else is data. fp32 at least (fp64 stays fp64).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class LossInputError(ValueError):
    """Data that has no loss: names sample and position, the value seen, and what to look at."""


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Which response token each packed row is; used in errors only."""

    sample_ids: tuple[str, ...]
    sample: Tensor
    """int64 `[T]`: index into `sample_ids`."""
    position: Tensor
    """int64 `[T]`: index in the response."""

    def name(self, row: int) -> str:
        """`sample <id>, response position <n>` of a packed row."""
        return f"sample {self.sample_ids[int(self.sample[row])]}, response position {int(self.position[row])}"


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One row per loss token (or padding row, where `mask` is off)."""

    logprobs: Tensor
    """`[T]` log p of the sampled token, with gradient."""
    candidate_logprobs: Tensor | None
    """`[T, K]` log p of the recorded candidates, with gradient; None when the loss needs none."""
    sampler_logprobs: Tensor
    """`[T]` log q of the sampled token."""
    sampler_candidate_logprobs: Tensor | None
    """`[T, K]` log q of the candidates."""
    candidate_ids: Tensor | None
    """int64 `[T, K]`; -1 marks an unused entry."""
    label_ids: Tensor
    """int64 `[T]`: the sampled token."""
    advantages: Tensor
    """`[T]`: the sample's advantage, on each of its tokens."""
    mask: Tensor
    """bool `[T]`: tokens the loss counts."""
    origin: TokenOrigin


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The loss of one microbatch, and sums over its loss tokens from which the step's metrics are made."""

    loss: Tensor
    """Scalar: sum over the loss tokens / the global number of loss tokens. Microbatches and ranks add up."""
    token_loss: Tensor
    """`[T]`, detached, zero where masked."""
    logprobs: Tensor
    """`[T]`, detached: log p as compared with the sampler (renormalised over the support in `support` mode)."""
    sums: dict[str, Tensor]
    """Metric name -> fp64 sum over the loss tokens; divide by the global count for the mean."""
    peaks: dict[str, Tensor]
    """Metric name -> largest value over the loss tokens (0 without any)."""


def loss_dtype(*tensors: Tensor) -> torch.dtype:
    """fp32, or fp64 when any input is fp64: losses are never computed in half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def refuse(bad: Tensor, origin: TokenOrigin, values: Tensor, what: str, advice: str) -> None:
    """Raise `LossInputError` for the first row where `bad` (bool `[T]` or `[T, K]`) holds; `values` is shown."""
    if not bool(bad.any()):
        return
    where = tuple(int(i) for i in bad.nonzero()[0])
    column = f", candidate {where[1]}" if len(where) > 1 else ""
    raise LossInputError(f"{origin.name(where[0])}{column}: {what} is {values[where].item()}; {advice}")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """fp64 sum over the loss tokens, detached; masked rows may hold anything."""
    return torch.where(mask, values.detach().double(), 0.0).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """fp64 maximum over the loss tokens, detached; 0 without any."""
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return torch.where(mask, values.detach().double(), 0.0).amax()


def times_where_nonzero(coefficient: Tensor, values: Tensor) -> Tensor:
    """`coefficient * values`, with exactly 0 (and no gradient) where the coefficient is 0, whatever the value is.

    A zero coefficient on log 0 = -inf would otherwise be NaN, in the value and in the gradient.
    """
    return coefficient * torch.where(coefficient == 0, torch.zeros_like(values), values)


def check_normaliser(normaliser: float) -> None:
    """The global number of loss tokens must be positive; a step without any has nothing to learn from."""
    if not normaliser > 0:
        raise LossInputError(
            f"the global number of loss tokens is {normaliser}: every sample of the step is masked or empty"
        )
