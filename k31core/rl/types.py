"""The nouns of the loop: prompts, completions, samples, groups. No torch.

Axes: P prompt tokens, R response tokens, K recorded candidates, L decoder layers, E_k experts a token.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from k31core.rl.selection import SelectedKeys

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was drawn (it is the last token of the response)."""
    LENGTH = "length"
    """The token limit cut it: a truncated answer."""
    ABORT = "abort"
    """Cancelled by the caller; never trained on."""


class PromptState(StrEnum):
    """The one final state of every prompt drawn in a step."""

    TRAINED = "trained"
    DROPPED = "dropped"
    """All rewards of its group were equal (dynamic sampling)."""
    SURPLUS = "surplus"
    """Finished after enough groups were there."""
    REQUEUED = "requeued"
    """Aborted; drawn again in the next step."""


class GradeReason(StrEnum):
    """What a grader saw."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_THINK_END = "no_think_end"
    NO_BOX = "no_box"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """Failed the static check of size, exponents and depth; scored 0 without evaluation."""
    GRADER_ERROR = "grader_error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both graders' opinions of one answer; None where a grader was not asked."""

    deepscaler: int | None
    math_verify: int | None
    reason: GradeReason
    """What the grader that trains saw (the first that was asked)."""
    deepscaler_reason: GradeReason | None = None
    math_verify_reason: GradeReason | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenised with the chat template."""

    prompt_id: str
    """Content hash of messages and label: stable over shuffles and epochs."""
    tokens: tuple[int, ...]
    """`[P]` token ids, generation prompt included."""
    label: str
    row: int
    """Row of the prepared data set."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn."""

    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """0 is off."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    """Per request: from (run seed, step, group, sample). Results depend on it, never on the batch."""
    top_logprobs_num: int = 0
    """K: candidates to record for each token."""
    return_routing: bool = False
    return_selection: bool = False
    """Record the keys that the DSA indexer selects (indexer replay)."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt to complete."""

    request_id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    policy_version: int
    """Adapter version that must serve it; an engine with another version refuses."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine drew, and everything the trainer needs to know about how."""

    request_id: str
    tokens: IntArray
    """`[R]` sampled ids, the stop token included."""
    logprobs: FloatArray
    """`[R]` log q of each sampled token, at the sampling temperature (after any top-p/top-k renormalisation)."""
    top_ids: IntArray
    """`[R, K]` candidates by falling log-prob (ties: smaller id first); −1 where fewer exist (filtered sampling)."""
    top_logprobs: FloatArray
    """`[R, K]` log q of the candidates; −inf at padding."""
    routing: NDArray[np.int16] | None
    """`[P + R − 1, L, E_k]` expert choice for every token that was an input; dense layers 0. None when not asked."""
    finish: FinishReason
    policy_version: int
    selection: SelectedKeys | None = None
    """Keys selected by every layer with an indexer, for every token that was an input. None when not asked."""

    @property
    def truncated(self) -> bool:
        """The token limit cut the answer."""
        return self.finish is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its reward, inside its group."""

    sample_id: str
    """`<step>-<group>-<sample>`: names it in every error."""
    prompt: Prompt
    completion: Completion
    reward: float
    verdict: Verdict
    group: int
    """Index of the group in the step."""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...] = field(default_factory=tuple)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards in sample order."""
        return tuple(s.reward for s in self.samples)
