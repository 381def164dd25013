"""The Engine protocol over one or several SGLang servers.

    generate() ──► gate (closed while an adapter is loaded) ──► server with the fewest requests ──► decode in a thread

An answer is decoded off the event loop, so that grading and other answers go on. The adapter is loaded under a name
that is new every time, and every answer must say that it was drawn with exactly that content (`weight_version`).
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from k31core.recipe.train import LoraRecipe
from k31core.rl.selection import SelectedKeys
from k31core.rl.types import Completion, FinishReason, GenerateRequest
from k31core.rollout.engine import EngineError, EngineHealth, StaleVersionError
from k31core.rollout.engines.sglang.adapter_files import Factors
from k31core.rollout.engines.sglang.adapters import AdapterShelf, EngineLostError, Served
from k31core.rollout.engines.sglang.client import ServerError, SglangClient
from k31core.rollout.engines.sglang.launch import ServerProcess
from k31core.rollout.engines.sglang.payload import Answer, ModelShape, PayloadError, decode_answer, encode_request

T = TypeVar("T")
ALL_MEMORY = ["kv_cache", "weights", "cuda_graph"]


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """How the engine behaves."""

    shape: ModelShape
    factors: Factors
    """Factors of an adapter this engine serves."""
    lora: LoraRecipe
    max_total_tokens: int
    flat_candidates: bool
    """The server sends candidates as base64 arrays (from 0.5.22)."""
    base_kept: bool
    """The server keeps a host copy of the base, so it may release its weights."""
    pinned_adapters: bool
    """Attention DP needs its adapters pinned."""


class SglangEngine:
    """See `k31core.rollout.engine.Engine`. Made by `open_sglang`."""

    def __init__(
        self,
        clients: Sequence[SglangClient],
        processes: Sequence[ServerProcess],
        options: SglangOptions,
        base_version: str,
    ) -> None:
        self._clients, self._processes, self._options = list(clients), list(processes), options
        self._shelf = AdapterShelf(
            clients,
            options.factors,
            options.lora,
            pinned=options.pinned_adapters,
            base=Served(-1, None, base_version, None),
        )
        self._gate, self._idle = asyncio.Lock(), asyncio.Event()
        self._idle.set()
        self._tasks: dict[str, asyncio.Task[Completion]] = {}
        self._server_of: dict[str, SglangClient] = {}
        self._aborted: set[str] = set()
        self._awake = self._weights_awake = True
        self._base_lost = self._closed = False
        self._failure = ""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Draw one completion. Raises StaleVersionError, EngineError; ValueError for a request that can never fit."""
        async with self._gate:
            self._require_awake()
            if request.policy_version != self._shelf.served.version:
                raise StaleVersionError(
                    f"request {request.request_id} wants adapter version {request.policy_version}, version "
                    f"{self._shelf.served.version} is loaded: load the adapter first"
                )
            self._check_fits(request)
            task = asyncio.create_task(self._generate(request, self._shelf.served))
            self._tasks[request.request_id] = task
            self._idle.clear()
            task.add_done_callback(lambda _: self._forget(request.request_id))
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError(f"request {request.request_id} was not finished: the engine was closed") from None
            task.cancel()
            raise

    async def score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs `[n − 1]` of a fixed sequence with the current adapter at temperature 1."""
        if len(tokens) < 2:
            raise ValueError(f"a sequence to score needs at least 2 tokens, got {len(tokens)}")
        self._check_tokens(tokens)
        async with self._gate:
            self._require_awake()
            return await self._shelf.score_on(self._clients[0], tokens, self._shelf.served)

    async def load_adapter(self, directory: Path, version: int) -> str:
        """Serve `directory` as `version` on every server once running requests are done; returns its digest.

        Raises AdapterRefusedError, with the old adapter served. A server that does not confirm makes the whole engine
        unusable: it could answer the next step with the wrong weights.
        """
        if version < 0:
            raise ValueError(f"adapter version {version}: versions count from 0")
        async with self._gate:
            await self._drain()
            return await self._confirmed(self._shelf.load_directory(directory, version))

    async def load_adapter_tensors(
        self, payloads: Sequence[str], version: int, digest: str, checksums: Mapping[str, str] | None = None
    ) -> None:
        """Serve what the handles `payloads` (one a rank, server by server) point at as `version`.

        The handles must stay valid until this returns. Raises AdapterRefusedError; there is no way back to an adapter
        whose handles are gone, so a refusal leaves the engine without one: load a directory or publish again.
        """
        async with self._gate:
            await self._drain()
            sums = None if checksums is None else dict(checksums)
            await self._confirmed(self._shelf.load_handles(payloads, version, digest, sums))

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End requests early; their `generate` returns with FinishReason.ABORT. Unknown ids are ignored."""
        for request_id in set(request_ids) & self._tasks.keys():
            self._aborted.add(request_id)
            client = self._server_of.get(request_id)
            if client is None or not client.at_server(request_id):
                self._tasks[request_id].cancel()
            else:
                await client.abort(request_id)

    async def sleep(self) -> None:
        """Release GPU memory once running requests are done: caches, and the weights where the host has a copy."""
        async with self._gate:
            self._require_alive()
            if not self._awake:
                return
            await self._idle.wait()
            for client in self._clients:
                await client.flush_cache()
            for client in self._clients:
                await client.release_memory(ALL_MEMORY)
            self._awake = self._weights_awake = False
            self._base_lost = not self._options.base_kept

    async def begin_base(self) -> None:
        """The base is about to be sent again: take the memory of the weights, open a session on every server."""
        async with self._gate:
            self._require_alive()
            await self._idle.wait()
            await self._wake_weights()
            for client in self._clients:
                await client.begin_weights()

    async def update_base(self, payloads: Sequence[str]) -> None:
        """One piece of the base, by handle: one a rank, server by server. Returns once every server has copied it."""
        per = len(payloads) // len(self._clients)
        for index, client in enumerate(self._clients):
            await client.update_weights(list(payloads[index * per : (index + 1) * per]))

    async def end_base(self) -> None:
        """Every piece was sent: the servers compute with this base from now on."""
        async with self._gate:
            for client in self._clients:
                await client.end_weights()
            self._base_lost = False

    async def wake(self) -> None:
        """Take the memory back, weights first: the caches take what is left.

        Raises EngineError while the servers have neither a host copy of the base nor got it again.
        """
        async with self._gate:
            self._require_alive()
            if self._awake:
                return
            if self._base_lost:
                raise EngineError(
                    "the servers released the base and keep no copy (rollout.engine.lora_base_cpu_backup is off): "
                    "send the base (sync.resend_base) between begin_base() and end_base() first"
                )
            await self._wake_weights()
            for client in self._clients:
                await client.resume_memory(["kv_cache", "cuda_graph"])
            self._awake = True

    async def _wake_weights(self) -> None:
        if self._weights_awake:
            return
        for client in self._clients:
            await client.resume_memory(["weights"])
        self._weights_awake = True

    async def health(self) -> EngineHealth:
        """A moment's view; never raises."""
        sent = sum(client.sent for client in self._clients)
        problem = self._failure
        if not problem and not self._closed and self._awake:
            answers = await asyncio.gather(*(client.healthy() for client in self._clients))
            problem = "; ".join(answer for answer in answers if answer)
        return EngineHealth(
            alive=not self._closed and not problem,
            policy_version=self._shelf.served.version,
            running=sent,
            waiting=max(0, len(self._tasks) - sent),
            awake=self._awake,
            detail=problem,
        )

    async def close(self) -> None:
        """End requests, connections and the servers that this engine started. Idempotent."""
        if self._closed:
            return
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        for process in self._processes:
            await process.stop()

    async def _generate(self, request: GenerateRequest, served: Served) -> Completion:
        client = min(self._clients, key=lambda c: (c.load, c.url))
        self._server_of[request.request_id] = client
        flat = self._options.flat_candidates
        try:
            body = await client.generate(
                request.request_id,
                lambda rid: encode_request(request, rid=rid, lora_name=served.lora_name, flat=flat),
            )
            answer = Answer(body, client.url, served.weight_version)
            return await asyncio.to_thread(decode_answer, answer, request, self._options.shape)
        except (asyncio.CancelledError, ServerError, PayloadError):
            if request.request_id in self._aborted and not self._closed:
                return self._nothing(request)
            raise

    def _nothing(self, request: GenerateRequest) -> Completion:
        """The completion of a request that was aborted before it drew a token."""
        k, shape = request.params.top_logprobs_num, self._options.shape
        routing = np.zeros((0, shape.num_layers, shape.experts_per_token), np.int16)
        bits = np.zeros((0, shape.index_layers, 0), np.uint8)
        return Completion(
            request.request_id,
            np.zeros(0, np.int32),
            np.zeros(0, np.float32),
            np.zeros((0, k), np.int32),
            np.zeros((0, k), np.float32),
            routing if request.params.return_routing else None,
            FinishReason.ABORT,
            request.policy_version,
            SelectedKeys(bits, shape.index_topk) if request.params.return_selection else None,
        )

    async def _drain(self) -> None:
        """Wait for everything accepted; the gate is held, so nothing new arrives."""
        self._require_awake()
        await self._idle.wait()
        self._require_alive()

    async def _confirmed(self, loading: Awaitable[T]) -> T:
        try:
            return await loading
        except EngineLostError as error:
            self._failure = str(error)
            raise

    def _forget(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        self._server_of.pop(request_id, None)
        self._aborted.discard(request_id)
        if not self._tasks:
            self._idle.set()

    def _check_fits(self, request: GenerateRequest) -> None:
        params, limit = request.params, self._options.max_total_tokens
        if request.request_id in self._tasks:
            raise ValueError(f"request id {request.request_id!r} is already running: ids must be unique")
        if not request.tokens:
            raise ValueError(f"request {request.request_id} needs at least one prompt token")
        self._check_tokens(request.tokens)
        if params.max_new_tokens < 1:
            raise ValueError(f"request {request.request_id}: max_new_tokens {params.max_new_tokens} must be at least 1")
        if len(request.tokens) + params.max_new_tokens > limit:
            raise ValueError(
                f"request {request.request_id}: {len(request.tokens)} prompt tokens and max_new_tokens "
                f"{params.max_new_tokens} exceed rollout.engine.max_total_tokens {limit}"
            )
        if params.return_selection and not self._options.shape.index_layers:
            raise ValueError(
                f"request {request.request_id}: asks for the DSA selection (rollout.indexer_replay), but the "
                f"checkpoint has no dsa_config"
            )
        encode_request(request, rid="", lora_name=None, flat=False)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab = self._options.shape.vocab_size
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise ValueError(f"token {bad} is outside the vocabulary of {vocab}")

    def _require_alive(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure:
            raise EngineError(f"the engine failed and must be restarted: {self._failure}")

    def _require_awake(self) -> None:
        self._require_alive()
        if not self._awake:
            raise EngineError("the engine is asleep: call wake() first")
