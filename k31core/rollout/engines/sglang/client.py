"""One SGLang server over HTTP: the calls we make, with deadlines and errors that say what to do."""

import asyncio
import itertools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from k31core.rollout.engine import EngineError

CONTROL_TIMEOUT_S = 600.0
"""Loading an adapter or releasing memory; generation has the recipe's own limit."""
_FIRST_PAUSE_S = 0.5


class ServerError(EngineError):
    """A server that answered with an error, or not at all: names the server, the call and its reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; None when no answer came."""


class SglangClient:
    """See the module. Made inside the event loop that uses it; `close` ends its connections."""

    def __init__(self, url: str, *, timeout_s: float, retries: int, max_concurrent: int) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        self._places = asyncio.Semaphore(max_concurrent)
        self._rids: dict[str, str] = {}
        self._asked, self._numbers = 0, itertools.count()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def sent(self) -> int:
        """Requests that are at the server now."""
        return len(self._rids)

    @property
    def load(self) -> int:
        """Requests sent and waiting for a place."""
        return self._asked

    def at_server(self, request_id: str) -> bool:
        """Whether the request has been sent and its answer is not back."""
        return request_id in self._rids

    async def generate(self, request_id: str, encode: Callable[[str], bytes]) -> bytes:
        """The body of the one answer that counts for `request_id`.

        `encode` writes the request under an id that is new for every attempt, and a lost attempt is aborted at the
        server before the next one, so that an answer can never be counted twice. Waits for a free place first.
        """
        self._asked += 1
        try:
            async with self._places:
                for attempt in range(self._retries):
                    try:
                        return await self._attempt(request_id, encode)
                    except ServerError as error:
                        if not _worth_another(error):
                            raise
                    await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
                return await self._attempt(request_id, encode)
        finally:
            self._asked -= 1

    async def _attempt(self, request_id: str, encode: Callable[[str], bytes]) -> bytes:
        rid = f"{request_id}.{next(self._numbers)}"
        self._rids[request_id] = rid
        try:
            return await self._call("/generate", encode(rid), self._timeout_s)
        except asyncio.CancelledError:
            await asyncio.shield(self._abort_quietly(rid))
            raise
        except ServerError as error:
            await self._abort_quietly(rid)
            raise ServerError(f"request {request_id} (sent as {rid}): {error}", error.status) from error.__cause__
        finally:
            self._rids.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        """End a request that is at the server; its `generate` returns what there is. Unknown ids are ignored."""
        rid = self._rids.get(request_id)
        if rid is not None:
            await self.post("/abort_request", {"rid": rid}, timeout_s=60.0)

    async def load_lora(self, name: str, path: str, *, pinned: bool) -> None:
        """Load an adapter directory under a new name."""
        await self.post("/load_lora_adapter", {"lora_name": name, "lora_path": path, "pinned": pinned})

    async def load_lora_tensors(
        self,
        name: str,
        config: dict[str, Any],
        payloads: list[str],
        *,
        pinned: bool,
        checksums: dict[str, str] | None = None,
    ) -> None:
        """Load an adapter from serialised tensors, one base64 payload a TP rank, each one flattened bucket.

        `checksums` (tensor → SHA-256, SGLang from 0.5.23) makes every rank compare every tensor: slow, for checks.
        """
        body: dict[str, Any] = {
            "lora_name": name,
            "config_dict": config,
            "serialized_named_tensors": payloads,
            "load_format": "flattened_bucket",
            "pinned": pinned,
        }
        if checksums is not None:
            body["expected_checksums"] = checksums
        await self.post("/load_lora_adapter_from_tensors", body)

    async def update_weights(self, payloads: list[str]) -> None:
        """Overwrite some of the base's weights from handles, one flat bucket a TP rank, within a session.

        The prefix cache is not flushed here: the adapter that follows flushes it.
        """
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
        await self.post("/update_weights_from_tensor", body)

    async def begin_weights(self) -> None:
        """Open a session in which packed weights are as they were loaded (SGLang from 0.5.23)."""
        await self.post("/begin_weight_update", {})

    async def end_weights(self) -> None:
        """Close the session: the weights are packed again for the kernels."""
        await self.post("/end_weight_update", {})

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter."""
        await self.post("/unload_lora_adapter", {"lora_name": name})

    async def set_weight_version(self, version: str) -> None:
        """What every answer from now on says about its weights."""
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def flush_cache(self) -> None:
        """Forget cached prefixes; refused by the server while requests run."""
        await self.post("/flush_cache", None)

    async def release_memory(self, tags: list[str]) -> None:
        """Give up GPU memory: `weights`, `kv_cache`, `cuda_graph`."""
        await self.post("/release_memory_occupation", {"tags": tags})

    async def resume_memory(self, tags: list[str]) -> None:
        """Take GPU memory back."""
        await self.post("/resume_memory_occupation", {"tags": tags})

    async def model_info(self) -> dict[str, Any]:
        """Model path and weight version."""
        return await self._json("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """Version and resolved arguments."""
        return await self._json("/server_info")

    async def healthy(self, timeout_s: float = 10.0) -> str | None:
        """None when the server answers /health, else why not."""
        try:
            await self._call("/health", None, timeout_s, method="GET")
        except ServerError as error:
            return str(error)
        return None

    async def post(self, path: str, body: dict[str, Any] | None, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """A control call; raises ServerError with the server's own reason."""
        data = await self._call(path, b"" if body is None else orjson.dumps(body), timeout_s)
        if data.startswith(b"{") and b'"success":false' in data.replace(b" ", b""):
            raise ServerError(f"{self.url}{path}: {_reason(data)}", 200)
        return data

    async def close(self) -> None:
        """End all connections; idempotent."""
        await self._session.close()

    async def _json(self, path: str) -> dict[str, Any]:
        data = await self._call(path, None, 60.0, method="GET")
        try:
            tree = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ServerError(f"{self.url}{path} answered {data[:200]!r}, expected JSON") from error
        if not isinstance(tree, dict):
            raise ServerError(f"{self.url}{path} answered {data[:200]!r}, expected an object")
        return tree

    async def _call(self, path: str, body: bytes | None, timeout_s: float, *, method: str = "POST") -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(method, self.url + path, data=body, headers=headers) as response:
                    data = await response.read()
                    status = response.status
        except TimeoutError as error:
            raise ServerError(
                f"{self.url}{path}: no answer within {timeout_s:g} s; the server hangs: look at its log, restart it"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerError(f"{self.url}{path}: connection lost ({type(error).__name__}: {error})") from error
        if status != 200:
            raise ServerError(f"{self.url}{path} answered {status}: {_reason(data)}", status)
        return data

    async def _abort_quietly(self, rid: str) -> None:
        """Best effort: the server may be gone, which is why the request was lost."""
        try:
            await self.post("/abort_request", {"rid": rid}, timeout_s=5.0)
        except ServerError:
            return


def _worth_another(error: ServerError) -> bool:
    """A 5xx answer or a lost connection; never a timeout (the server hangs) nor a refusal."""
    if error.status is not None:
        return error.status >= 500
    return not isinstance(error.__cause__, TimeoutError)


def _reason(data: bytes) -> str:
    """The sentence in an error answer, in any of the forms SGLang uses."""
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode("utf-8", "replace").strip()[:500] or "no reason given"
    while isinstance(tree, dict):
        found = next((tree[k] for k in ("error_message", "error", "message", "detail") if tree.get(k)), None)
        if found is None:
            break
        tree = found
    return str(tree)[:500]
