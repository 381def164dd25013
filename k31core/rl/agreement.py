"""How far trainer and sampler disagree about the drawn tokens. Growth over steps, more than level, is trouble."""

import torch
from torch import Tensor

from k31core.rl.loss_records import masked_max, masked_sum

CLAMP = 10.0
"""d is clamped to plus and minus this in the KL estimate; the absolute difference is not."""


def agreement_sums(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(sums, peaks) over the loss tokens, from the current forward pass; d = log p - log q of the drawn token, `[T]`.

    `train/train_rollout_logprob_abs_diff` sums |d|; `train/train_rollout_kl` sums exp(d) - 1 - d with d clamped.
    """
    d = logprobs.detach().double() - sampler_logprobs.double()
    near = torch.where(mask, d, 0.0).clamp(-CLAMP, CLAMP)
    sums = {
        "train/train_rollout_logprob_abs_diff": masked_sum(d.abs(), mask),
        "train/train_rollout_kl": masked_sum(torch.expm1(near) - near, mask),
    }
    return sums, {"train/train_rollout_logprob_abs_diff_max": masked_max(d.abs(), mask)}
