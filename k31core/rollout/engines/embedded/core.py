"""The synchronous heart of the embedded engine: a call advances prompts and the running batch. One thread at a time."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k31core.rl.selection import SelectedKeys, joined, selection_shape
from k31core.rl.types import Completion, FinishReason, GenerateRequest
from k31core.rollout.engine import EngineError
from k31core.rollout.engines.embedded.attention import BLOCK
from k31core.rollout.engines.embedded.cache import Caches, PromptState, page_count
from k31core.rollout.engines.embedded.forward import CachedDecoder, Piece, StepInput
from k31core.rollout.engines.embedded.graphs import decode_graphs
from k31core.rollout.engines.embedded.prompts import PromptJob, PromptWork, packed_bits, prompt_key
from k31core.rollout.engines.embedded.sampler import Drawn, draw
from k31core.rollout.engines.embedded.scheduler import Running, Scheduler


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine may hold."""

    max_concurrent_requests: int
    max_total_tokens: int
    """Cached tokens of all requests, prompt and longest answer; rounded up to whole pages."""
    prefill_chunk_tokens: int
    """Prompt tokens computed between two decoding steps."""
    keep_prompts: int = 8
    """Finished prompts kept for requests that wait with the same tokens."""


class EngineCore:
    """Requests in, completions out. `advance` is to be called until `busy` is false."""

    def __init__(self, decoder: CachedDecoder, limits: Limits, *, cuda_graphs: bool = False) -> None:
        """`cuda_graphs`: replay captured decoding steps where that is possible (never on a CPU)."""
        self._decoder, self.limits = decoder, limits
        self._multiple = decoder.row_multiple
        self._build = decoder.model.build
        pages = page_count(limits.max_total_tokens)
        rows = -(-limits.max_concurrent_requests // self._multiple) * self._multiple
        self.scheduler = Scheduler(limits.max_concurrent_requests, pages, BLOCK)
        self.prompts = PromptWork(decoder, limits.prefill_chunk_tokens, limits.keep_prompts)
        self.caches = Caches(decoder.config, rows, pages, self._build.dtype, self._build.device)
        self._graphs = decode_graphs(decoder, self.caches, wanted=cuda_graphs)
        self._last_token = np.zeros(rows, dtype=np.int64)
        self._position = np.zeros(rows, dtype=np.int64)
        self._page_table = np.zeros((rows, pages), dtype=np.int64)

    @property
    def busy(self) -> bool:
        """Something waits or runs."""
        return self.scheduler.busy

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._decoder.config.vocab_size

    def check_fits(self, request: GenerateRequest) -> None:
        """Raise ValueError for a request that can never run."""
        params, vocab = request.params, self.vocab_size
        if not request.tokens or params.max_new_tokens < 1:
            raise ValueError(
                f"request {request.request_id}: needs at least one prompt token and one new token, got "
                f"{len(request.tokens)} and max_new_tokens {params.max_new_tokens}"
            )
        for token in (min(request.tokens), max(request.tokens)):
            if not 0 <= token < vocab:
                raise ValueError(
                    f"request {request.request_id}: token id {token} is outside the vocabulary of {vocab}; "
                    "is the tokenizer the model's?"
                )
        need = self.scheduler.pages_of(request)
        if need > self.scheduler.pages:
            raise ValueError(
                f"request {request.request_id}: {len(request.tokens)} prompt + {params.max_new_tokens} new tokens need "
                f"{need} pages of {BLOCK}, the cache has {self.scheduler.pages}; raise rollout.engine.max_total_tokens"
            )
        if params.return_selection and self._decoder.config.dsa is None:
            raise ValueError(
                f"request {request.request_id}: asks for the DSA selection (rollout.indexer_replay), but "
                f"{self._decoder.config.family} has no indexer"
            )
        limit = self._decoder.config.max_position_embeddings
        if len(request.tokens) + params.max_new_tokens > limit:
            raise ValueError(f"request {request.request_id}: longer than the model's context of {limit} tokens")

    def submit(self, requests: list[GenerateRequest]) -> None:
        """Queue requests (checked by `check_fits`) in this order."""
        self.scheduler.waiting.extend(requests)

    def advance(self) -> list[Completion]:
        """Admit, compute a piece of prompts, then one token for every running request; returns what finished."""
        with torch.inference_mode():
            return self._advance()

    def _advance(self) -> list[Completion]:
        for running in self.scheduler.admit():
            self.prompts.add(running)
        finished: list[Completion] = []
        if self.scheduler.prompts:
            ready = self.prompts.advance()
            if ready:
                finished += self._start(ready)
            self.prompts.forget({prompt_key(request) for request in self.scheduler.waiting})
        if self.scheduler.rows:
            finished += self._decode()
        return finished

    def abort(self, request_ids: set[str]) -> list[Completion]:
        """End these requests wherever they are."""
        aborted: list[Completion] = []
        scheduler = self.scheduler
        for request in [r for r in scheduler.waiting if r.request_id in request_ids]:
            scheduler.waiting.remove(request)
            aborted.append(_never_started(request, self._decoder))
        for running in [r for r in scheduler.prompts if r.request.request_id in request_ids]:
            scheduler.prompts.remove(running)
            self.prompts.drop_request(running)
            scheduler.release(running)
            aborted.append(_never_started(running.request, self._decoder))
        stopped = [r for r in scheduler.rows if r.request.request_id in request_ids]
        aborted += [self._completion(running, FinishReason.ABORT) for running in stopped]
        self._close_rows(stopped)
        return aborted

    def score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs `[n - 1]` of a fixed sequence at temperature 1."""
        with torch.inference_mode():
            return self._score(tokens)

    def _score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        state = PromptState.empty(self._decoder.config, len(tokens), self._build.dtype, self._build.device)
        ids = torch.tensor(tokens, device=self._build.device)
        step = max(self.limits.prefill_chunk_tokens // BLOCK, 1) * BLOCK
        values: list[float] = []
        for start in range(0, len(tokens) - 1, step):
            piece = Piece(ids[start : min(start + step, len(tokens) - 1)], start, state)
            hidden, _ = self._decoder.prefill([piece])
            logprobs = torch.log_softmax(self._decoder.logits(hidden), dim=-1)
            labels = ids[start + 1 : start + 1 + len(hidden)]
            values += logprobs.gather(1, labels[:, None]).squeeze(1).tolist()
        return tuple(values)

    def forget_prompts(self) -> None:
        """Nothing computed with the old adapter may be used again. Only while not busy."""
        assert not self.busy
        self.prompts.clear()

    def _start(self, ready: list[PromptJob]) -> list[Completion]:
        """Put the requests of finished prompts into rows and draw their first token."""
        started: list[Running] = []
        logits: list[Tensor] = []
        waiting = set()
        for job in ready:
            rows = [self.scheduler.start(running) for running in job.requests]
            self.caches.place(job.state, rows, [running.pages for running in job.requests])
            for row, running in zip(rows, job.requests, strict=True):
                self._position[row] = running.prompt_length
                self._page_table[row] = 0
                self._page_table[row, : len(running.pages)] = running.pages
                if running.request.params.return_routing:
                    running.output.routing.extend(job.routing)
                running.output.selection.extend(job.selection or [])
            started += job.requests
            assert job.logits is not None
            logits.append(job.logits.expand(len(rows), -1))
            waiting.update(job.requests)
            job.requests = []
        self.scheduler.prompts = type(self.scheduler.prompts)(r for r in self.scheduler.prompts if r not in waiting)
        return self._sample(torch.cat(logits), started)

    def _decode(self) -> list[Completion]:
        rows = list(self.scheduler.rows)
        count = len(rows)
        padded = -(-count // self._multiple) * self._multiple
        self._position[count:padded] = 0
        self._page_table[count:padded] = 0
        blocks = int(self._position[:count].max()) // BLOCK + 1
        step = StepInput(
            self._to_device(self._last_token[:padded]),
            self._to_device(self._position[:padded]),
            self._to_device(self._page_table[:padded, :blocks]),
        )
        selected: list[Tensor] | None = [] if any(r.request.params.return_selection for r in rows) else None
        if self._graphs is not None and selected is None:
            logits, routing = self._graphs.decode(step)
        else:
            logits, routing = self._decoder.decode(step, self.caches, selected)
        if selected is not None:
            self._record_selection(rows, packed_bits(selected))
        routing_np = routing[:count].cpu().numpy()
        for running in rows:
            if running.request.params.return_routing:
                running.output.routing.append(routing_np[running.row : running.row + 1])
        self._position[:count] += 1
        return self._sample(logits, rows)

    def _record_selection(self, rows: list[Running], bits: NDArray[np.uint8]) -> None:
        """Keep what the rows attended, packed bits `[B, M, w]`, where a token has more keys than it may attend."""
        for running in rows:
            if running.request.params.return_selection and self._position[running.row] >= self._decoder.index_topk:
                running.output.selection.append(bits[running.row : running.row + 1])

    def _completion(self, running: Running, finish: FinishReason) -> Completion:
        done = running.output.completion(finish)
        if not running.request.params.return_selection:
            return done
        inputs, layers = running.prompt_length + len(done.tokens) - 1, len(self._decoder.config.mla_layers)
        keys = joined(running.output.selection, inputs=inputs, layers=layers, topk=self._decoder.index_topk)
        return replace(done, selection=keys)

    def _sample(self, logits: Tensor, rows: list[Running]) -> list[Completion]:
        """Draw a token for each of `rows` (in the order of `logits`), record it, close finished rows."""
        uniforms = np.array([running.output.next_uniform for running in rows])
        drawn = draw(logits, [running.request.params for running in rows], uniforms)
        _check_finite(drawn, rows)
        done: list[Running] = []
        finished: list[Completion] = []
        for i, running in enumerate(rows):
            keep = int(drawn.counts[i])
            token = int(drawn.tokens[i])
            candidates = (drawn.top_ids[i, :keep], drawn.top_logprobs[i, :keep]) if keep else (None, None)
            reason = running.output.append(token, float(drawn.logprobs[i]), *candidates)
            self._last_token[running.row] = token
            if reason is not None:
                done.append(running)
                finished.append(self._completion(running, reason))
        self._close_rows(done)
        return finished

    def _close_rows(self, done: list[Running]) -> None:
        moves = self.scheduler.finish(done)
        if moves:
            self.caches.move_rows(moves)
            source, target = [a for a, _ in moves], [b for _, b in moves]
            for table in (self._last_token, self._position, self._page_table):
                table[target] = table[source]

    def _to_device(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._build.device)


def _check_finite(drawn: Drawn, rows: list[Running]) -> None:
    if np.isfinite(drawn.logprobs).all():
        return
    at = int(np.flatnonzero(~np.isfinite(drawn.logprobs))[0])
    running = rows[at]
    raise EngineError(
        f"request {running.request.request_id}: log-prob of response token {len(running.output.tokens)} is "
        f"{drawn.logprobs[at]} under adapter version {running.request.policy_version}; adapter or base is damaged"
    )


def _never_started(request: GenerateRequest, decoder: CachedDecoder) -> Completion:
    """An aborted request without a single token."""
    config = decoder.config
    inputs = len(request.tokens) - 1
    shape = (inputs, config.num_hidden_layers, config.num_experts_per_token)
    bits = np.zeros(selection_shape(inputs, len(config.mla_layers), decoder.index_topk), dtype=np.uint8)
    return Completion(
        request_id=request.request_id,
        tokens=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        top_ids=np.zeros((0, 0), dtype=np.int32),
        top_logprobs=np.zeros((0, 0), dtype=np.float32),
        routing=np.zeros(shape, dtype=np.int16) if request.params.return_routing else None,
        finish=FinishReason.ABORT,
        policy_version=request.policy_version,
        selection=SelectedKeys(bits, decoder.index_topk) if request.params.return_selection else None,
    )
