"""The loss: advantages, score centering or the clipped policy gradient, and the reward that feeds them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section


class RewardRecipe(Section):
    """The grader that trains; the other one is logged beside it."""

    grader: Literal["deepscaler", "math_verify"] = "deepscaler"
    audit_grader: Literal["deepscaler", "math_verify"] | None = "math_verify"
    """Second opinion, logged with the disagreement rate; None is off."""
    truncated_is_zero: bool = False
    """Force 0 for an answer cut at the token limit."""
    workers: int = Field(2, ge=1)
    wall_limit_s: float = Field(5.0, gt=0)
    cpu_limit_s: float = Field(5.0, gt=0)
    memory_limit_mb: int = Field(1024, ge=128)


class AlgorithmRecipe(Section):
    """What one optimizer step minimises."""

    loss: Literal["score_centering", "grpo"] = "score_centering"
    importance: Literal["none", "tis", "mis"] = "none"
    """Importance weight f of score centering: 1, min(r, 2), or r inside [0.5, 5] and else 0 (IcePop)."""
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    """PPO clipping of `grpo`: the ratio stays inside [1 − clip_low, 1 + clip_high]."""
    shuffle_advantages: bool = False
    """Control experiment: advantages are shuffled within each group, so nothing can be learnt."""


class WatchdogRecipe(Section):
    """Limits on the numbers. Each warns, then stops with the evidence saved; None switches one off."""

    tail_ratio_warn: float | None = 3.0
    tail_ratio_stop: float | None = 10.0
    """Stop when rho stays above this for `patience` steps."""
    logprob_abs_diff_warn: float | None = 0.05
    logprob_abs_diff_stop: float | None = 0.2
    logprob_abs_diff_slope_stop: float | None = 0.05
    """Rise of the agreement metric over ten steps."""
    grad_norm_spike_factor: float | None = 10.0
    """An isolated spike only warns."""
    stop_on_nan: bool = True
    stop_on_zero_gradient: bool = True
    allocated_growth_warn_mb: float | None = 512.0
    allocated_growth_stop_mb: float | None = 4096.0
    """Allocated memory after a sync above its baseline: the export leaks."""
    host_rss_growth_mb_per_step: float | None = 512.0
    patience: int = Field(3, ge=1)


class EvalRecipe(Section):
    """Held-out evaluation; reported, never a reason to stop."""

    interval: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    max_prompts: int | None = Field(None, ge=1)
    name: str = "heldout"
    """Metrics are `eval/<name>`; `aime` for AIME-2024."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature == 0.0 and self.samples_per_prompt > 1:
            raise ValueError("eval.samples_per_prompt > 1 needs eval.temperature > 0: greedy samples are all equal")
        return self
