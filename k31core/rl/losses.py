"""The loss of one microbatch, chosen by the recipe's fields; normalised by the global token count, an argument.

The normaliser N counts the loss tokens of the whole step (all microbatches, DP and CP ranks). A fully masked sample
adds nothing to it, so packing, sample order and layout change nothing but rounding.
"""

from dataclasses import dataclass, replace
from typing import Literal

from k31core.rl.agreement import agreement_sums
from k31core.rl.candidates import CandidateMode, on_support
from k31core.rl.loss_records import LossInputs, LossOutputs
from k31core.rl.policy_gradient import grpo_loss
from k31core.rl.score_centering import Weighting, score_centering_loss


@dataclass(frozen=True, slots=True)
class LossChoice:
    """Which loss, with its plain numbers."""

    kind: Literal["score_centering", "grpo"]
    weighting: Weighting = Weighting.NONE
    mode: CandidateMode = CandidateMode.SELECTED
    clip_low: float = 0.2
    clip_high: float = 0.2

    @property
    def needs_candidates(self) -> bool:
        """Whether the trainer must compute log-probs of the recorded candidates."""
        return self.kind == "score_centering" or self.mode is CandidateMode.SUPPORT


def policy_loss(inputs: LossInputs, choice: LossChoice, *, normaliser: float) -> LossOutputs:
    """The chosen loss with the train/rollout agreement sums added to its metrics."""
    if choice.kind == "score_centering":
        outputs = score_centering_loss(inputs, weighting=choice.weighting, mode=choice.mode, normaliser=normaliser)
    else:
        # Filtered sampling draws from p renormalised over what could be drawn; the ratio must compare like with like.
        inputs = on_support(inputs) if choice.mode is CandidateMode.SUPPORT else inputs
        outputs = grpo_loss(inputs, clip_low=choice.clip_low, clip_high=choice.clip_high, normaliser=normaliser)
    sums, peaks = agreement_sums(outputs.logprobs, inputs.sampler_logprobs, inputs.mask)
    return replace(outputs, sums={**outputs.sums, **sums}, peaks={**outputs.peaks, **peaks})
