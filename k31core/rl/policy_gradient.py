"""The clipped policy gradient (`grpo`): PPO's surrogate with group advantages, no KL and no entropy term."""

import torch

from k31core.rl.loss_records import (
    LossInputs,
    LossOutputs,
    check_normaliser,
    loss_dtype,
    masked_max,
    masked_sum,
    refuse,
)


def grpo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float, normaliser: float) -> LossOutputs:
    """Sum of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) over the loss tokens / `normaliser`; r = p / q.

    The sampler's log-probs are the old policy. Raises `LossInputError`, naming sample and position, for a log-prob or a
    loss that is not finite on an active token.
    """
    check_normaliser(normaliser)
    mask, origin = inputs.mask, inputs.origin
    dtype = loss_dtype(inputs.logprobs, inputs.sampler_logprobs)
    log_p = torch.where(mask, inputs.logprobs.to(dtype), 0.0)
    log_q = torch.where(mask, inputs.sampler_logprobs.to(dtype), 0.0)
    refuse(~log_q.isfinite(), origin, log_q, "the sampler's log-prob", "the rollout record is damaged")
    refuse(~log_p.isfinite(), origin, log_p, "the trainer's log-prob", "the forward pass is not finite")
    advantage = torch.where(mask, inputs.advantages.to(dtype), 0.0)
    ratio = (log_p - log_q).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = -torch.minimum(ratio * advantage, clipped * advantage)
    refuse(~token_loss.isfinite(), origin, token_loss, "the loss", "trainer and sampler disagree beyond any ratio")
    sums = {
        "train/clip_fraction": masked_sum(clipped * advantage < ratio * advantage, mask),
        "train/importance_weight": masked_sum(ratio, mask),
    }
    peaks = {"train/importance_weight_max": masked_max(ratio, mask)}
    return LossOutputs(token_loss.sum() / normaliser, token_loss.detach(), log_p.detach(), sums, peaks)
