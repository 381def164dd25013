"""What a running request has produced so far, and the completion made of it. No torch.

Legend: P prompt tokens, R response tokens, K candidates, L layers, k experts a token.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from k31core.rl.types import Completion, FinishReason, FloatArray, GenerateRequest, IntArray

_RAW_TO_UNIT = 2.0**-53


@dataclass(slots=True)
class Output:
    """Buffers of one request."""

    request: GenerateRequest
    uniforms: NDArray[np.float64]
    """`[max_new_tokens]` in [0, 1): the draw of each response position."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[IntArray] = field(default_factory=list)
    """Candidates of each token, best first."""
    top_logprobs: list[FloatArray] = field(default_factory=list)
    routing: list[NDArray[np.int16]] = field(default_factory=list)
    """Pieces `[n, L, k]` for consecutive input tokens: the prompt, then one row a step."""
    selection: list[NDArray[np.uint8]] = field(default_factory=list)
    """Packed pieces `[n, M, w]` for consecutive input tokens, from number topk on (see `SelectedKeys`)."""

    @staticmethod
    def for_request(request: GenerateRequest) -> "Output":
        """Empty buffers; the draws are a counter-based stream of the request's seed, one a position."""
        return Output(request, uniform_draws(request.params.seed, request.params.max_new_tokens))

    @property
    def next_uniform(self) -> float:
        """The draw of the next token."""
        return float(self.uniforms[len(self.tokens)])

    def append(
        self, token: int, logprob: float, ids: IntArray | None, logprobs: FloatArray | None
    ) -> FinishReason | None:
        """Add a sampled token; returns why the request is now finished, or None."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if ids is not None and logprobs is not None:
            self.top_ids.append(ids)
            self.top_logprobs.append(logprobs)
        params = self.request.params
        if token in params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) == params.max_new_tokens else None

    def completion(self, finish: FinishReason) -> Completion:
        """The finished record; candidate rows shorter than the longest are padded with -1 and -inf."""
        width = max((len(ids) for ids in self.top_ids), default=0)
        top_ids = np.full((len(self.tokens), width), -1, dtype=np.int32)
        top_logprobs = np.full((len(self.tokens), width), -np.inf, dtype=np.float32)
        for i, (ids, values) in enumerate(zip(self.top_ids, self.top_logprobs, strict=True)):
            top_ids[i, : len(ids)], top_logprobs[i, : len(ids)] = ids, values
        return Completion(
            request_id=self.request.request_id,
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            routing=np.concatenate(self.routing) if self.routing else None,
            finish=finish,
            policy_version=self.request.policy_version,
        )


def uniform_draws(seed: int, count: int) -> NDArray[np.float64]:
    """`[count]` draws in [0, 1): number t is word t of the Philox-4x64 stream keyed by `seed`, whoever else draws."""
    raw = np.random.Philox(key=seed).random_raw(count)
    return (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * _RAW_TO_UNIT
