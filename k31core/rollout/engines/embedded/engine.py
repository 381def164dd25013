"""The embedded engine behind the Engine protocol: an event loop outside, one worker thread inside.

    generate() ──► incoming ──► thread: core.advance() ──► futures
                                  ▲ between two calls the event loop runs: new requests, aborts, grading of finished
                                  answers

The caller's requests are queued in the order of their `generate` calls. Adapter loads, sleep and close wait until
everything that was accepted before them has finished.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import torch

from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import IGNORED_PREFIXES, base_slots, expected_names
from k31core.rl.types import Completion, GenerateRequest
from k31core.rollout.engine import EngineError, EngineHealth, StaleVersionError
from k31core.rollout.engines.embedded.adapter import swap_adapter
from k31core.rollout.engines.embedded.core import EngineCore, Limits
from k31core.rollout.engines.embedded.forward import CachedDecoder

T = TypeVar("T")
_STEPS_A_CALL = 4
"""Decoding steps between two looks at the event loop."""
_LEAVING_S = 0.002
"""Pause before looking again whether a cancelled request has left."""


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """How the engine computes."""

    limits: Limits
    lora: LoraSpec | None = None
    """The only adapter shape it will serve; None: the base alone."""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    threads: int = 1
    """CPU threads; bits depend on it."""
    row_multiple: int = 8
    cuda_graphs: bool = False
    """Replay captured decoding steps on a GPU."""
    base_digest: str | None = None
    """Identity of the base; an adapter whose manifest names another one is refused."""


class EmbeddedEngine:
    """See `k31core.rollout.engine.Engine`. Make it with `open`, end it with `close`."""

    def __init__(self, model_dir: Path, options: EmbeddedOptions) -> None:
        """Does no work yet; use `open`."""
        self._model_dir, self._options = model_dir, options
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=_set_threads, initargs=(options.threads,)
        )
        self._decoder: Decoder | None = None
        self._core: EngineCore | None = None
        self._incoming: list[GenerateRequest] = []
        self._aborting: set[str] = set()
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._loop_task: asyncio.Task[None] | None = None
        self._gate = asyncio.Lock()
        self._version = -1
        self._failure: str | None = None
        self._closed = False

    @classmethod
    async def open(cls, model_dir: Path, options: EmbeddedOptions) -> Self:
        """Load the checkpoint and allocate the caches. Raises ConfigError or CheckpointError naming the file."""
        engine = cls(model_dir, options)
        try:
            engine._decoder = await engine._in_thread(lambda: load_decoder(model_dir, options))
            await engine.wake()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, request: GenerateRequest) -> Completion:
        """Draw one completion. Raises StaleVersionError, EngineError; ValueError for a request that can never fit."""
        while (old := self._futures.get(request.request_id)) is not None and old.cancelled():
            await asyncio.sleep(_LEAVING_S)  # its caller is gone; the engine lets go of it at the next step
        async with self._gate:
            core = self._require_core()
            if request.policy_version != self._version:
                raise StaleVersionError(
                    f"request {request.request_id} wants adapter version {request.policy_version}, version "
                    f"{self._version} is loaded: load the adapter first"
                )
            core.check_fits(request)
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} is already running: ids must be unique")
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._futures[request.request_id] = future
            self._incoming.append(request)
            self._ensure_running()
        try:
            return await future
        except asyncio.CancelledError:
            self._aborting.add(request.request_id)
            raise

    async def score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs `[n - 1]` of a fixed sequence with the current adapter at temperature 1."""
        if len(tokens) < 2:
            raise ValueError(f"a sequence to score needs at least 2 tokens, got {len(tokens)}")
        async with self._gate:
            core = self._require_core()
            vocab = core.vocab_size
            if not all(0 <= token < vocab for token in tokens):
                raise ValueError(f"a token to score is outside the vocabulary of {vocab}: {min(tokens)}..{max(tokens)}")
            return await self._in_thread(lambda: core.score(tokens))

    async def load_adapter(self, directory: Path, version: int) -> str:
        """Serve `directory` as `version` once running requests are done; returns its digest.

        Raises AdapterRefusedError; the old adapter is served until then.
        """
        if version < 0:
            raise ValueError(f"adapter version {version}: versions count from 0")
        async with self._gate:
            core, decoder = self._require_core(), self._decoder
            assert decoder is not None
            await self._drain()
            digest = await self._in_thread(lambda: swap_adapter(decoder, directory, self._options.base_digest))
            core.forget_prompts()
            self._version = version
            return digest

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End requests early; their `generate` returns with FinishReason.ABORT. Unknown ids are ignored."""
        self._aborting.update(set(request_ids) & self._futures.keys())

    async def sleep(self) -> None:
        """Free the caches once running requests are done. The weights stay: there is no second copy of them here."""
        async with self._gate:
            self._require_alive()
            await self._drain()
            self._core = None

    async def wake(self) -> None:
        """Allocate the caches again; the adapter that was loaded is still served."""
        async with self._gate:
            self._require_alive()
            if self._core is None:
                assert self._decoder is not None
                decoder, options = self._decoder, self._options
                self._core = await self._in_thread(
                    lambda: EngineCore(CachedDecoder(decoder), options.limits, cuda_graphs=options.cuda_graphs)
                )

    async def health(self) -> EngineHealth:
        """A moment's view; never raises."""
        core = self._core
        running = 0 if core is None else len(core.scheduler.rows) + len(core.scheduler.prompts)
        return EngineHealth(
            alive=self._failure is None and not self._closed,
            policy_version=self._version,
            running=running,
            waiting=len(self._futures) - running,
            awake=core is not None,
            detail=self._failure or "",
        )

    async def close(self) -> None:
        """Stop at the next step; waiting requests fail with EngineError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._loop_task is not None:
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail_all("the engine was closed")
        self._thread.shutdown(wait=True)
        self._core = self._decoder = None

    def _ensure_running(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._serve(), name="embedded-engine")

    async def _serve(self) -> None:
        """Advance until nothing is left. A failure of the computation fails every request and marks the engine dead."""
        core = self._core
        assert core is not None
        try:
            while (self._incoming or core.busy) and not self._closed:
                incoming, self._incoming = self._incoming, []
                aborting, self._aborting = self._aborting, set()
                for completion in await self._in_thread(lambda: _advance(core, incoming, aborting)):  # noqa: B023
                    future = self._futures.pop(completion.request_id)
                    if not future.done():
                        future.set_result(completion)
        except Exception as error:  # whatever it was, nobody must wait for these requests any longer
            self._failure = f"{type(error).__name__}: {error}"
            self._fail_all(self._failure)

    def _fail_all(self, why: str) -> None:
        futures, self._futures = self._futures, {}
        for request_id, future in futures.items():
            if not future.done():
                future.set_exception(EngineError(f"request {request_id} was not finished: {why}"))

    async def _drain(self) -> None:
        """Wait for everything accepted; the gate is held, so nothing new arrives."""
        if self._loop_task is not None:
            await self._loop_task
        self._require_alive()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _require_alive(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(f"the engine failed and must be restarted: {self._failure}")

    def _require_core(self) -> EngineCore:
        self._require_alive()
        if self._core is None:
            raise EngineError("the engine is asleep: call wake() first")
        return self._core


def load_decoder(model_dir: Path, options: EmbeddedOptions) -> Decoder:
    """The decoder with the checkpoint's weights and an adapter of zeros (the base alone)."""
    config = load_config(model_dir)
    build = Build(
        dtype=options.dtype, device=torch.device(options.device), lora=options.lora, row_multiple=options.row_multiple
    )
    checkpoint = NativeCheckpoint(model_dir)
    checkpoint.check_names(expected_names(config), IGNORED_PREFIXES)
    decoder = Decoder(config, build)
    decoder.requires_grad_(False)
    checkpoint.load(base_slots(decoder))
    return decoder


def _advance(core: EngineCore, incoming: list[GenerateRequest], aborting: set[str]) -> list[Completion]:
    """Some steps in the engine's thread: until something finishes, at most `_STEPS_A_CALL`."""
    core.submit(incoming)
    finished = core.abort(aborting) if aborting else []
    for _ in range(_STEPS_A_CALL):
        if finished or not core.busy:
            break
        finished = core.advance()
    return finished


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
