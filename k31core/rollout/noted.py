"""An engine that gives a sign of life for every answer, so that a rollout that hangs is told from a long one."""

from collections.abc import Callable
from pathlib import Path

from k31core.rl.types import Completion, GenerateRequest
from k31core.rollout.engine import Engine, EngineHealth


class NotedEngine:
    """See `k31core.rollout.engine.Engine`: every call is passed on."""

    def __init__(self, engine: Engine, note: Callable[[str], None]) -> None:
        self.inner, self._note = engine, note

    async def generate(self, request: GenerateRequest) -> Completion:
        """Draw one completion and note it."""
        completion = await self.inner.generate(request)
        self._note(f"answer {request.request_id}")
        return completion

    async def score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """The canary."""
        return await self.inner.score(tokens)

    async def load_adapter(self, directory: Path, version: int) -> str:
        """Serve an adapter directory."""
        return await self.inner.load_adapter(directory, version)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End requests early."""
        await self.inner.abort(request_ids)

    async def sleep(self) -> None:
        """Release memory."""
        await self.inner.sleep()

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self.inner.wake()

    async def health(self) -> EngineHealth:
        """A moment's view."""
        return await self.inner.health()

    async def close(self) -> None:
        """Stop."""
        await self.inner.close()
