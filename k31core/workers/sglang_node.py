"""One node's part of an SGLang engine that spans nodes, as an actor hosts it: started, asked, stopped."""

import platform
from pathlib import Path
from typing import Any

from k31core.rollout.engines.sglang.flags import Place, server_port
from k31core.rollout.engines.sglang.launch import ServerProcess
from k31core.rollout.engines.sglang.open import start_node
from k31core.workers.rollout import parse_recipe_json


class SglangNodeWorker:
    """A plain class with JSON in and out. The engine's node 0 answers HTTP; the rollout worker joins it by URL."""

    def __init__(
        self, recipe_json: str, model_dir: str, run_dir: str, engine: int, node_rank: int, head_address: str
    ) -> None:
        self._recipe = parse_recipe_json(recipe_json).recipe
        self._model_dir, self._run_dir = Path(model_dir), Path(run_dir)
        self._place = Place(engine, node_rank, head_address)
        self._process: ServerProcess | None = None

    async def start(self) -> dict[str, Any]:
        """Start the process; `url` is where the engine will answer. Raises EngineError before anything is started."""
        if self._process is None or self._process.exit_code is not None:
            log = self._run_dir / "logs" / f"sglang-{self._place.engine}-node-{self._place.node_rank}.log"
            self._process = start_node(self._recipe, self._model_dir, self._place, log)
        port = server_port(self._recipe, self._place.engine)
        return {
            "pid": self._process.pid,
            "log": str(self._process.log),
            "url": f"http://{self._place.head_address}:{port}",
        }

    async def state(self) -> dict[str, Any]:
        """Whether it runs, and what its log says when it does not."""
        what = f"SGLang engine {self._place.engine}, node {self._place.node_rank}"
        about = {"what": what, "host": platform.node(), "log": None}
        if self._process is None:
            return {**about, "running": False, "exit_code": None, "reason": "not started"}
        code = self._process.exit_code
        reason = "" if code is None else self._process.reason()
        return {
            **about,
            "running": code is None,
            "exit_code": code,
            "reason": reason,
            "log": str(self._process.log),
        }

    async def stop(self) -> None:
        """End the process and its children; idempotent."""
        if self._process is not None:
            await self._process.stop()
