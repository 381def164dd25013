"""The numbers of a rollout step, under the names users of this field know. No torch."""

from collections.abc import Iterable

import numpy as np

from k31core.rl.types import PromptState, Sample
from k31core.rollout.episode import StepResult, has_signal
from k31core.rollout.reward import audit


def step_metrics(result: StepResult, *, seconds: float, devices: int) -> dict[str, float]:
    """Metrics of a step that took `seconds` on `devices` engine devices.

    Lengths and truncation are over the samples that are trained on; `raw_reward_unfiltered` and the audit over every
    finished one.
    """
    kept = [sample for group in result.groups for sample in group.samples]
    finished = [sample for group in result.finished for sample in group.samples]
    lengths = np.array([len(sample.completion.tokens) for sample in kept])
    generated = sum(len(sample.completion.tokens) for sample in finished)
    states = [drawn.state for drawn in result.drawn]
    return {
        "rollout/raw_reward": _mean_reward(kept),
        "rollout/raw_reward_unfiltered": _mean_reward(finished),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/median": float(np.median(lengths)),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/truncated_ratio": float(np.mean([sample.completion.truncated for sample in kept])),
        "rollout/groups_drawn": float(len(states)),
        "rollout/groups_dropped": float(states.count(PromptState.DROPPED)),
        "rollout/groups_surplus": float(states.count(PromptState.SURPLUS)),
        "rollout/refills": float(result.refills),
        "rollout/groups_with_signal_ratio": float(np.mean([has_signal(group) for group in result.finished])),
        "rollout/generated_tokens": float(generated),
        **audit(finished),
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": generated / seconds / devices,
    }


def _mean_reward(samples: Iterable[Sample]) -> float:
    return float(np.mean([sample.reward for sample in samples]))
