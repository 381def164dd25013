"""The recorded candidates of every loss token: checked, padding made harmless, renormalised for filtered sampling.

Legend: T tokens, K recorded candidates H, p the trainer's distribution, q the sampler's.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from k31core.rl.loss_records import LossInputError, LossInputs, loss_dtype, refuse

MASS_SLACK = 1e-2
"""How far the recorded head's mass may lie above 1, and in `support` mode below it."""


class CandidateMode(StrEnum):
    """What the recorded candidates are; follows from how the rollout was sampled, never chosen."""

    SELECTED = "selected"
    """Unfiltered sampling: the head of the vocabulary, the tail is modelled."""
    SUPPORT = "support"
    """Filtered sampling (top-p, top-k, temperature): all that could be drawn; p is renormalised over it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The candidates of every row; -inf at padding and on masked rows."""

    log_p: Tensor
    """`[T, K]`, with gradient."""
    log_q: Tensor
    """`[T, K]`."""
    valid: Tensor
    """bool `[T, K]`."""


def broken(log_p: Tensor) -> Tensor:
    """NaN or +inf: never a log-probability. -inf is (p = 0); whether that is usable depends on its coefficient."""
    return log_p.isnan() | (log_p == torch.inf)


def checked_head(inputs: LossInputs, mode: CandidateMode) -> Head:
    """The candidates; raises `LossInputError`, naming sample and position.

    Refused: values that are not finite, a head that is no distribution, and in `support` mode a head that misses part
    of what could be drawn, or the drawn token.
    """
    if inputs.candidate_logprobs is None or inputs.sampler_candidate_logprobs is None or inputs.candidate_ids is None:
        raise LossInputError(
            "this loss needs the recorded candidates (score centering and filtered sampling do): set "
            "rollout.top_logprobs_num above 0"
        )
    dtype = loss_dtype(inputs.candidate_logprobs, inputs.sampler_candidate_logprobs)
    valid = (inputs.candidate_ids >= 0) & inputs.mask[:, None]
    minus_inf = torch.full((), -torch.inf, dtype=dtype, device=valid.device)
    head = Head(
        torch.where(valid, inputs.candidate_logprobs.to(dtype), minus_inf),
        torch.where(valid, inputs.sampler_candidate_logprobs.to(dtype), minus_inf),
        valid,
    )
    _check(inputs, head, mode)
    return head


def on_support(inputs: LossInputs) -> LossInputs:
    """The same rows with p renormalised over the recorded candidates, drawn token and candidates alike."""
    head = checked_head(inputs, CandidateMode.SUPPORT)
    # A masked row would be logsumexp of nothing: -inf, and NaN in its gradient.
    log_z = torch.where(inputs.mask[:, None], head.log_p, 0.0).logsumexp(-1)
    log_z = torch.where(inputs.mask, log_z, 0.0)
    refuse(
        ~log_z.isfinite(), inputs.origin, log_z, "the trainer's log-mass on the support", "it gives it probability 0"
    )
    return replace(inputs, logprobs=inputs.logprobs - log_z, candidate_logprobs=head.log_p - log_z[:, None])


def _check(inputs: LossInputs, head: Head, mode: CandidateMode) -> None:
    origin, log_p, log_q, valid = inputs.origin, head.log_p, head.log_q, head.valid
    assert inputs.candidate_ids is not None
    refuse(
        valid & ~log_q.isfinite(), origin, log_q, "the sampler's candidate log-prob", "the rollout record is damaged"
    )
    refuse(valid & broken(log_p), origin, log_p, "the trainer's candidate log-prob", "the forward pass is not finite")
    mass = log_q.detach().double().exp().sum(-1)
    refuse(
        mass > 1 + MASS_SLACK, origin, mass, "the sampler's head mass", "candidates are repeated or are no log-probs"
    )
    if mode is CandidateMode.SUPPORT:
        refuse(
            inputs.mask & (mass < 1 - MASS_SLACK),
            origin,
            mass,
            "the recorded share of what could be drawn",
            "filtered sampling needs all of it: raise rollout.top_logprobs_num, or narrow rollout.top_p / top_k",
        )
        drawn = (inputs.candidate_ids == inputs.label_ids[:, None]).any(-1)
        refuse(
            inputs.mask & ~drawn,
            origin,
            inputs.label_ids,
            "the drawn token",
            "it is not among the recorded candidates, which must be everything that could be drawn",
        )
