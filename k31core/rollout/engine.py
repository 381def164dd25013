"""The engine seam: what generates, whatever is behind it. Torch-free.

One contract suite (`tests/contract/`) runs against every implementation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from k31core.rl.types import Completion, GenerateRequest


class EngineError(RuntimeError):
    """The engine failed; names the request or adapter, the node, and the next step."""


class AdapterRefusedError(EngineError, ValueError):
    """An adapter that must not be served: wrong rank, base, shape, digest or a non-finite value."""


class StaleVersionError(EngineError):
    """A request asked for another adapter version than the one that is loaded."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A moment's view of the engine."""

    alive: bool
    policy_version: int
    """Version of the adapter being served; −1 before the first load (the base alone)."""
    running: int
    waiting: int
    awake: bool
    detail: str = ""


class Engine(Protocol):
    """Generates completions with the current adapter. All methods may be called from one event loop."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Draw one completion; concurrent calls share a continuous batch.

        The result depends on the request and the adapter only, never on the other requests (bit-equal on the
        embedded engine). Raises StaleVersionError, EngineError; ValueError for a request that can never fit.
        """
        ...

    async def score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs `[n − 1]` of a fixed sequence with the current adapter at temperature 1 (the canary)."""
        ...

    async def load_adapter(self, directory: Path, version: int) -> str:
        """Load a logical adapter directory as `version`; returns the digest of what was loaded.

        Either the whole adapter is served afterwards or the old one still is. Raises AdapterRefusedError.
        """
        ...

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End requests early; their `generate` returns with FinishReason.ABORT."""
        ...

    async def sleep(self) -> None:
        """Release the memory that training needs (caches, and the base where a host copy exists)."""
        ...

    async def wake(self) -> None:
        """Undo `sleep`; the adapter that was loaded is served again."""
        ...

    async def health(self) -> EngineHealth:
        """Never raises while the process lives."""
        ...

    async def close(self) -> None:
        """Stop and free everything; idempotent."""
        ...
