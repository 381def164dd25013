"""Prompts being computed: packed into calls of bounded size, shared by every request with the same tokens.

A prompt's result does not depend on what it is packed with, so the samples of a group share one computation, and a
waiting request with the same prompt finds it kept.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k31core.rl.types import GenerateRequest
from k31core.rollout.engines.embedded.attention import BLOCK
from k31core.rollout.engines.embedded.cache import PromptState
from k31core.rollout.engines.embedded.forward import CachedDecoder, Piece
from k31core.rollout.engines.embedded.scheduler import Running


@dataclass(slots=True)
class PromptJob:
    """One distinct prompt."""

    tokens: tuple[int, ...]
    state: PromptState
    done: int = 0
    """Tokens computed so far."""
    routing: list[NDArray[np.int16]] = field(default_factory=list)
    """`[t, L, k]` of each piece."""
    selection: list[NDArray[np.uint8]] | None = None
    """Packed bits `[t, M, w]` of the selected keys of consecutive tokens, from the first that has more than topk on;
    None: nobody asks."""
    logits: Tensor | None = None
    """fp32 `[1, V]` after the last token; None until finished."""
    requests: list[Running] = field(default_factory=list)
    """Waiting to start with it."""

    @property
    def finished(self) -> bool:
        """All tokens are in the state."""
        return self.logits is not None


PromptKey = tuple[tuple[int, ...], bool]
"""Tokens, and whether the selected keys are recorded: requests with the same key share one computation."""


def prompt_key(request: GenerateRequest) -> PromptKey:
    """Which computation a request shares."""
    return request.tokens, request.params.return_selection


class PromptWork:
    """The prompts in progress, and finished ones kept for requests that still wait."""

    def __init__(self, decoder: CachedDecoder, chunk_tokens: int, keep: int) -> None:
        self._decoder = decoder
        self._chunk = max(chunk_tokens // BLOCK, 1) * BLOCK
        self._keep = keep
        self._jobs: dict[PromptKey, PromptJob] = {}

    def add(self, running: Running) -> None:
        """Attach an admitted request to its prompt."""
        key = prompt_key(running.request)
        tokens, selection = key
        job = self._jobs.get(key)
        if job is None:
            build = self._decoder.model.build
            state = PromptState.empty(self._decoder.config, len(tokens), build.dtype, build.device)
            job = self._jobs[key] = PromptJob(tokens, state, selection=[] if selection else None)
        job.requests.append(running)

    def advance(self) -> list[PromptJob]:
        """Compute a chunk of unfinished prompts, oldest first; returns those with requests ready to start."""
        pieces, jobs, room = [], [], self._chunk
        device = self._decoder.model.build.device
        for job in self._jobs.values():
            if job.finished or room < BLOCK:
                continue
            left = len(job.tokens) - job.done
            count = left if left <= room else room // BLOCK * BLOCK
            tokens = torch.tensor(job.tokens[job.done : job.done + count], device=device)
            pieces.append(Piece(tokens, job.done, job.state, None if job.selection is None else []))
            jobs.append(job)
            room -= count
        if pieces:
            self._compute(pieces, jobs)
        return [job for job in self._jobs.values() if job.finished and job.requests]

    def _compute(self, pieces: list[Piece], jobs: list[PromptJob]) -> None:
        hidden, routing = self._decoder.prefill(pieces)
        routing_np = routing.cpu().numpy()
        ends = np.cumsum([len(piece.tokens) for piece in pieces]).tolist()
        last = self._decoder.logits(hidden[[end - 1 for end in ends]])
        for number, (piece, job, end) in enumerate(zip(pieces, jobs, ends, strict=True)):
            job.done += len(piece.tokens)
            job.routing.append(routing_np[end - len(piece.tokens) : end])
            if job.selection is not None and piece.selected is not None:
                early = max(0, self._decoder.index_topk - piece.start)
                job.selection.append(packed_bits([mask[early:] for mask in piece.selected]))
            if job.done == len(job.tokens):
                job.logits = last[number : number + 1]

    def forget(self, wanted: set[PromptKey]) -> None:
        """Drop finished prompts without requests, except up to `keep` of those in `wanted`."""
        idle = [key for key, job in self._jobs.items() if job.finished and not job.requests]
        spare = [key for key in idle if key in wanted][: self._keep]
        for key in set(idle) - set(spare):
            del self._jobs[key]

    def drop_request(self, running: Running) -> None:
        """The request was cancelled before it started."""
        key = prompt_key(running.request)
        job = self._jobs[key]
        job.requests.remove(running)
        if not job.requests and not job.finished:
            del self._jobs[key]

    def clear(self) -> None:
        """Forget everything (a new adapter: nothing computed before is valid)."""
        self._jobs.clear()


def packed_bits(masks: list[Tensor]) -> NDArray[np.uint8]:
    """bool `[n, slots]` of each of M layers -> u8 `[n, M, slots / 8]`, lowest bit first (see `SelectedKeys`)."""
    return np.packbits(torch.stack(masks, dim=1).cpu().numpy(), axis=-1, bitorder="little")
