"""Score centering (arXiv:2609.20807): a policy gradient whose score has mean zero under the sampler, from its top-K.

Legend: T tokens, K recorded candidates H, p the trainer's distribution, q the sampler's, f the importance weight.

    rho   = max(1 - sum_H q, 1e-6) / max(1 - sum_H p, 1e-6)         tail of the sampler over tail of the trainer
    alpha = rho * f(1 / rho)                                         the same correction for the unrecorded tail
    coef  = q f(p / q) - alpha p                                     for each candidate, detached
    loss  = -A * ( f(p_tok / q_tok) log p_tok - sum_H coef log p )   weights detached, gradient through log p only
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from k31core.rl.candidates import CandidateMode, broken, checked_head, on_support
from k31core.rl.loss_records import (
    LossInputs,
    LossOutputs,
    check_normaliser,
    loss_dtype,
    masked_max,
    masked_sum,
    refuse,
    times_where_nonzero,
)

TAIL_FLOOR = 1e-6
"""Smallest tail mass, of either side."""
TIS_CAP = 2.0
MIS_RANGE = (0.5, 5.0)
_BOUND_SLACK = 1e-6
"""Room for the rounding of log p - log q at the inclusive bounds of `mis`."""


class Weighting(StrEnum):
    """The importance weight f(r), r = p / q."""

    NONE = "none"
    """1."""
    TIS = "tis"
    """min(r, 2)."""
    MIS = "mis"
    """r inside [0.5, 5], else 0 (IcePop)."""


@dataclass(frozen=True, slots=True)
class Centering:
    """Detached pieces of the loss of each token."""

    rho: Tensor
    """`[T]`."""
    alpha: Tensor
    """`[T]`."""
    coef: Tensor
    """`[T, K]`, zero at padding."""
    weight: Tensor
    """`[T]`: f(p / q) of the sampled token."""
    sampler_head_mass: Tensor
    """`[T]`: sum_H q."""
    train_head_mass: Tensor
    """`[T]`: sum_H p."""


def importance_weight(log_ratio: Tensor, weighting: Weighting) -> Tensor:
    """f(r) from log r, without overflow; -inf is r = 0."""
    if weighting is Weighting.NONE:
        return torch.ones_like(log_ratio)
    if weighting is Weighting.TIS:
        return log_ratio.clamp(max=math.log(TIS_CAP)).exp()
    low, high = (math.log(bound) for bound in MIS_RANGE)
    inside = (log_ratio >= low - _BOUND_SLACK) & (log_ratio <= high + _BOUND_SLACK)
    return torch.where(inside, log_ratio.clamp(low, high).exp(), 0.0)


def centering(
    log_p: Tensor, log_q: Tensor, label_log_p: Tensor, label_log_q: Tensor, valid: Tensor, weighting: Weighting
) -> Centering:
    """The detached coefficients of each token.

    log_p, log_q: `[T, K]`, -inf at padding; label_log_p, label_log_q: `[T]`; valid: bool `[T, K]`. Head masses and the
    tail ratio are formed in fp64: 1 - sum cancels when the head holds nearly everything.
    """
    log_p, log_q = log_p.detach(), log_q.detach()
    p = torch.where(valid, log_p, -torch.inf).double().exp()
    q = torch.where(valid, log_q, -torch.inf).double().exp()
    p_mass, q_mass = p.sum(-1), q.sum(-1)
    rho = (1 - q_mass).clamp(min=TAIL_FLOOR) / (1 - p_mass).clamp(min=TAIL_FLOOR)
    alpha = rho * importance_weight(-rho.log(), weighting)
    ratio = torch.where(valid, log_p - log_q, 0.0)
    coef = torch.where(valid, q * importance_weight(ratio, weighting).double() - alpha[:, None] * p, 0.0)
    weight = importance_weight(label_log_p.detach() - label_log_q, weighting)
    dtype = log_p.dtype
    return Centering(rho, alpha, coef.to(dtype), weight, q_mass, p_mass)


def score_centering_loss(
    inputs: LossInputs, *, weighting: Weighting, mode: CandidateMode, normaliser: float
) -> LossOutputs:
    """Sum over the loss tokens of the centred policy gradient / `normaliser` (the global number of loss tokens).

    Raises `LossInputError`, naming sample and position, for a head that is not finite, is no distribution, or (in
    `support` mode) misses part of what could be drawn, and for an active token whose loss is not finite.
    """
    check_normaliser(normaliser)
    if mode is CandidateMode.SUPPORT:
        inputs = on_support(inputs)
    head = checked_head(inputs, mode)
    mask, origin = inputs.mask, inputs.origin
    dtype = loss_dtype(inputs.logprobs, inputs.sampler_logprobs)
    label_log_q = torch.where(mask, inputs.sampler_logprobs.to(dtype), 0.0)
    refuse(~label_log_q.isfinite(), origin, label_log_q, "the sampler's log-prob", "the rollout record is damaged")
    # Masked rows may hold anything; they are replaced before any arithmetic, so that no NaN reaches a gradient.
    label_log_p = torch.where(mask, inputs.logprobs.to(dtype), 0.0)
    refuse(broken(label_log_p), origin, label_log_p, "the trainer's log-prob", "the forward pass is not finite")
    pieces = centering(head.log_p, head.log_q, label_log_p, label_log_q, head.valid, weighting)
    advantage = torch.where(mask, inputs.advantages.to(dtype), 0.0)
    label_term = times_where_nonzero(-advantage * pieces.weight, label_log_p)
    correction = times_where_nonzero(advantage[:, None] * pieces.coef, head.log_p).sum(-1)
    token_loss = label_term + correction
    refuse(
        ~token_loss.isfinite(),
        origin,
        token_loss,
        "the loss",
        "the trainer gives a drawn or recorded token probability 0: rollout and trainer do not run the same model",
    )
    sums = {
        "train/sc_correction": masked_sum(correction, mask),
        "train/sc_train_head_mass": masked_sum(pieces.train_head_mass, mask),
        "train/sc_rollout_head_mass": masked_sum(pieces.sampler_head_mass, mask),
        "train/sc_tail_ratio": masked_sum(pieces.rho, mask),
        "train/importance_weight": masked_sum(pieces.weight, mask),
    }
    peaks = {"train/sc_tail_ratio_max": masked_max(pieces.rho, mask)}
    return LossOutputs(token_loss.sum() / normaliser, token_loss.detach(), label_log_p.detach(), sums, peaks)
