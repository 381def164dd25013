"""Which adapter every server serves: one out, one in, confirmed; on a refusal the old one comes back."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.recipe.train import LoraRecipe
from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engine import AdapterRefusedError, EngineError
from k31core.rollout.engines.sglang.adapter_files import Factors, check_adapter, sglang_config, write_for_sglang
from k31core.rollout.engines.sglang.client import ServerError, SglangClient
from k31core.rollout.engines.sglang.payload import PayloadError, decode_scores, encode_request

_PROBE_TOKENS = (0, 1)


class EngineLostError(EngineError):
    """The servers serve neither the new nor the old adapter: the engine must be restarted."""


@dataclass(frozen=True, slots=True)
class Served:
    """The adapter that is served, or the base alone."""

    version: int
    lora_name: str | None
    weight_version: str
    """What every answer must say about its weights."""
    directory: Path | None
    """Where it can be loaded from again; None for the base and for one that came by handle."""


class AdapterShelf:
    """Loads adapters on all servers of an engine. Nothing may be generated while a method runs."""

    def __init__(
        self, clients: Sequence[SglangClient], factors: Factors, lora: LoraRecipe, *, pinned: bool, base: Served
    ) -> None:
        """`pinned`: attention DP needs its adapters pinned."""
        self._clients, self._factors, self._lora, self._pinned = list(clients), factors, lora, pinned
        self._base = self.served = base
        self._loads = 0

    async def load_directory(self, directory: Path, version: int) -> str:
        """Serve the adapter at `directory`; returns its digest. Raises AdapterRefusedError or EngineLostError."""
        adapter = await asyncio.to_thread(check_adapter, directory, self._factors, self._lora)
        new = self._named(version, adapter.digest, directory)
        renamed = directory.parent / f".{directory.name}.sglang-{self._loads}"
        old, touched = self.served, list[SglangClient]()
        try:
            await asyncio.to_thread(write_for_sglang, adapter, renamed)
            for client in self._clients:
                touched.append(client)
                await self._swap(client, old.lora_name, new, self._from_path(client, new, str(renamed)))
        except (ServerError, PayloadError) as error:
            await self._restore(touched, new, old)
            raise AdapterRefusedError(f"{directory}: the server refused it, the old one is served: {error}") from error
        finally:
            shutil.rmtree(renamed, ignore_errors=True)
        self.served = new
        return adapter.digest

    async def load_handles(
        self, payloads: Sequence[str], version: int, digest: str, checksums: dict[str, str] | None = None
    ) -> None:
        """Serve what the handles point at: the first server's ranks, then the next one's.

        Raises AdapterRefusedError, and then no adapter is served.
        """
        per, rest = divmod(len(payloads), len(self._clients))
        if rest or not per:
            raise EngineError(f"{len(payloads)} handles do not divide over {len(self._clients)} servers")
        new = self._named(version, digest, None)
        config = sglang_config(self._lora.rank, self._lora.alpha, self._factors)
        old, self.served = self.served, self._base
        try:
            for index, client in enumerate(self._clients):
                load = self._from_handles(
                    client, new, config, list(payloads[index * per : (index + 1) * per]), checksums
                )
                await self._swap(client, old.lora_name, new, load)
        except (ServerError, PayloadError) as error:
            raise AdapterRefusedError(f"version {version}: {error}; no adapter is served, publish again") from error
        self.served = new

    def _from_handles(
        self,
        client: SglangClient,
        new: Served,
        config: dict[str, Any],
        payloads: list[str],
        checksums: dict[str, str] | None,
    ) -> Callable[[], Awaitable[None]]:
        async def load() -> None:
            assert new.lora_name is not None
            await client.load_lora_tensors(new.lora_name, config, payloads, pinned=self._pinned, checksums=checksums)

        return load

    async def score_on(self, client: SglangClient, tokens: tuple[int, ...], served: Served) -> tuple[float, ...]:
        """Log-probs `[n − 1]` of a sequence with an adapter on one server, temperature 1."""
        request = GenerateRequest("score", tokens, SamplingParams(1.0, 1.0, 0, 1, (), seed=0), served.version)

        def encode(rid: str) -> bytes:
            body = encode_request(request, rid=rid, lora_name=served.lora_name, flat=False)
            return body[:-1] + b',"logprob_start_len":0}'

        body = await client.generate("score", encode)
        return await asyncio.to_thread(decode_scores, body, tokens, client.url)

    def _named(self, version: int, digest: str, directory: Path | None) -> Served:
        """A name that no server has seen: loading a live name again is an error."""
        self._loads += 1
        name = f"k31-v{version}-{self._loads}"
        return Served(version, name, f"{name}-{digest[:16]}", directory)

    def _from_path(self, client: SglangClient, new: Served, path: str) -> Callable[[], Awaitable[None]]:
        async def load() -> None:
            assert new.lora_name is not None
            await client.load_lora(new.lora_name, path, pinned=self._pinned)

        return load

    async def _swap(
        self, client: SglangClient, old_name: str | None, new: Served, load: Callable[[], Awaitable[None]]
    ) -> None:
        """Unload, load, forget prefixes, rename the weights, and hear it confirmed by a first score."""
        if old_name is not None:
            await client.unload_lora(old_name)
        await load()
        await client.flush_cache()
        await client.set_weight_version(new.weight_version)
        seen = str((await client.model_info()).get("weight_version"))
        if seen != new.weight_version:
            raise ServerError(f"{client.url} says its weights are {seen!r} after loading {new.weight_version!r}")
        await self.score_on(client, _PROBE_TOKENS, new)

    async def _restore(self, clients: Sequence[SglangClient], new: Served, old: Served) -> None:
        renamed: Path | None = None
        try:
            if old.lora_name is not None:
                if old.directory is None:
                    raise EngineError("the old adapter came by handle and is gone")
                adapter = await asyncio.to_thread(check_adapter, old.directory, self._factors, self._lora)
                renamed = old.directory.parent / f".{old.directory.name}.sglang-restore"
                await asyncio.to_thread(write_for_sglang, adapter, renamed)
            for client in clients:
                await self._restore_on(client, new, old, renamed)
        except (EngineError, OSError) as error:
            raise EngineLostError(
                f"neither the new nor the old adapter could be loaded: {error}; restart the engine"
            ) from error
        finally:
            if renamed is not None:
                shutil.rmtree(renamed, ignore_errors=True)

    async def _restore_on(self, client: SglangClient, new: Served, old: Served, renamed: Path | None) -> None:
        for name in (new.lora_name, old.lora_name):
            if name is None:
                continue
            try:
                await client.unload_lora(name)
            except ServerError:  # not loaded there: that is what is wanted
                continue
        if old.lora_name is not None:
            await client.load_lora(old.lora_name, str(renamed), pinned=self._pinned)
        await client.flush_cache()
        await client.set_weight_version(old.weight_version)
