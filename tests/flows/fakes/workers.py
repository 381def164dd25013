"""Small stand-ins for the two workers, for tests of the flow alone: a "model" of four numbers, exact and fast.

They keep the workers' contracts: committed rollouts are returned and not drawn again, a restore gives back exactly
what was exported, digests agree on both sides. Faults are asked for with files beside the run directory:
`RUN.fault-METHOD` holds `error`, `exit`, `hang` or `nan` and a step; it is removed when it strikes, unless it says
`always`; of several trainer ranks it strikes the last one only.
"""

import asyncio
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from k31core.checkpoint import commit as commits
from k31core.checkpoint.store import step_name
from k31core.recipe.algorithm import EvalRecipe
from k31core.rollout.evaluation import Evaluation, table_file, write_table

WIDTH = 4


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def _strike(run_dir: Path, method: str, step: int) -> str | None:
    fault = run_dir.with_name(f"{run_dir.name}.fault-{method}")
    if not fault.exists():
        return None
    kind, at, *always = fault.read_text().split()
    if step != int(at):
        return None
    if not always:
        fault.unlink()
    if kind == "nan":
        return kind
    if kind == "exit":
        os._exit(1)
    if kind == "hang":
        time.sleep(3600)
    raise RuntimeError(f"injected fault in {method}")


class RolloutWorker:
    """Draws numbers near the adapter's."""

    def __init__(
        self, recipe_json: str, run_dir: str, model_dir: str, data_dir: str, evaluate_only: bool = False
    ) -> None:
        self.recipe = json.loads(recipe_json)
        self.run_dir = Path(run_dir)
        self.asked = evaluate_only
        self.version = -1
        _strike(self.run_dir, "init", 0)
        self.adapter = np.zeros(WIDTH, dtype=np.float32)

    async def start(self) -> None:
        """Nothing to load."""

    async def run(self, step: int, cursor: Any, policy_version: int, adapter_dir: str | None) -> dict[str, Any]:
        final = self.run_dir / "rollouts" / step_name(step)
        if not commits.is_committed(final):
            with (self.run_dir / "drawn.log").open("a") as log:
                log.write(f"{step}\n")
            if self.version != policy_version:
                await self.load_adapter(adapter_dir, policy_version)
            _strike(self.run_dir, "rollout", step)
            await asyncio.sleep(float(os.environ.get("K31_FAKE_SECONDS", "0")))
            start = (cursor or {"position": 0})["position"]
            rng = np.random.default_rng([self.recipe["seed"], step])
            facts: dict[str, Any] = {"step": step, "policy_version": policy_version}
            with commits.staged(final, "rollout", facts) as staging:
                samples = self.adapter + rng.standard_normal(WIDTH, dtype=np.float32)
                save_file({"samples": samples}, staging / "samples.safetensors")
                facts["cursor"] = {"position": start + 2}
                facts["metrics"] = {"rollout/raw_reward": float(1 - 1 / (step + 1)), "rollout/truncated_ratio": 0.0}
                facts["prompts"] = [{"prompt_id": f"p{start + i}", "state": "trained"} for i in range(2)]
        facts = commits.read_manifest(final)["facts"]
        return {
            "step": step,
            "directory": str(final),
            "files": [],
            **{k: facts[k] for k in ("metrics", "cursor", "prompts")},
        }

    async def load_adapter(self, directory: str, version: int) -> dict[str, Any]:
        self.adapter = load_file(Path(directory) / "adapter_model.safetensors")["w"]
        self.version = version
        return {"digest": _digest(self.adapter), "version": version}

    async def evaluate(self, step: int, policy_version: int) -> dict[str, float]:
        settings = EvalRecipe.model_validate(self.recipe["eval"])
        metrics = {f"eval/{settings.name}": float(np.tanh(np.abs(self.adapter).sum()))}
        problem = {"prompt_id": "p", "row": 0, "label": "34", "right": 1, "samples": 2, "truncated": 1}
        problem |= {"response_len_mean": 3.0, "reasons": ["correct", "no_box"], "first_answer": "34"}
        path = table_file(self.run_dir, settings, step, asked=self.asked)
        write_table(path, Evaluation(metrics, [problem] * 300), {"step": step, "policy_version": policy_version})
        return metrics

    async def score(self, tokens: list[int]) -> list[float]:
        return [float(self.adapter[t % WIDTH]) for t in tokens[1:]]

    async def health(self) -> dict[str, Any]:
        return {"alive": True, "running": 0, "waiting": 0, "policy_version": self.version}

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class TrainWorker:
    """Moves its four numbers towards the samples' mean, with momentum (its "optimizer state")."""

    def __init__(
        self, recipe_json: str, run_dir: str, model_dir: str, rank: int, world_size: int, init_method: str
    ) -> None:
        self.run_dir, self.rank, self.world_size = Path(run_dir), rank, world_size
        self.init_method = init_method
        self.mine = np.arange(WIDTH) % world_size == rank
        self.at = 0
        self.w = np.zeros(WIDTH, dtype=np.float32)
        self.m = np.zeros(WIDTH, dtype=np.float32)
        """Zero where another rank has it."""
        self.started = False

    def start(self) -> None:
        """Join the other ranks; nothing to load."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo", self.init_method, rank=self.rank, world_size=self.world_size)
        self._sum(self.w)
        self.started = True

    def measure_network(self) -> list[dict[str, Any]]:
        """The real all-reduce over the ranks' gloo group."""
        from k31core.parallel.bandwidth import measure_nodes

        return [result.to_json() for result in measure_nodes("node-a", num_bytes=1 << 16, iterations=2)]

    def step(self) -> int:
        return self.at

    def restore(self, adapter_dir: str | None) -> dict[str, Any]:
        assert self.started, "the trainer is not started"
        if adapter_dir is None:
            self.at, self.w, self.m = 0, np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
            return {"step": 0, "restored": [], "not_restored": []}
        directory = Path(adapter_dir)
        self.at = int(json.loads((directory / "trainer.json").read_text())["step"])
        self.w = load_file(directory / "adapter_model.safetensors")["w"]
        slices = [load_file(path)["m"] for path in sorted(directory.glob("optimizer-*.safetensors"))]
        self.m = np.where(self.mine, sum(slices), 0).astype(np.float32)
        return {"step": self.at, "restored": ["adapter", "optimizer"], "not_restored": []}

    def train(self, step: int, rollout_dir: str) -> dict[str, Any]:
        assert step == self.at + 1, (step, self.at)
        self._strike("train", step)
        time.sleep(float(os.environ.get("K31_FAKE_SECONDS", "0")))
        samples = load_file(Path(rollout_dir) / "samples.safetensors")["samples"]
        gradient = self._sum(np.where(self.mine, self.w - samples, 0).astype(np.float32))
        self.m = np.where(self.mine, 0.9 * self.m + gradient, 0).astype(np.float32)
        self.w = (self.w - 0.1 * self._sum(self.m)).astype(np.float32)
        self.at = step
        norm = float(np.linalg.norm(gradient))
        if self._strike("gradient", step) == "nan":
            norm = float("nan")
        return {
            "step": step,
            "metrics": {"train/grad_norm": norm, "train/loss": norm},
            "adapter_digest": _digest(self.w),
        }

    def export(self, step: int, out_dir: str, optimizer: bool) -> dict[str, Any]:
        self._strike("export", step)
        assert step == self.at
        out = Path(out_dir)
        if optimizer:
            save_file({"m": self.m}, out / f"optimizer-{self.rank}.safetensors")
        if self.rank == 0:
            save_file({"w": self.w}, out / "adapter_model.safetensors")
            (out / "trainer.json").write_text(json.dumps({"step": self.at}))
        self._sum(self.w)  # nobody reports a file that another rank is still writing
        return {"step": step, "adapter_digest": _digest(self.w)}

    def onload(self) -> int:
        return 0

    def offload(self) -> int:
        return 0

    def score(self, tokens: list[int]) -> list[float]:
        return [float(self.w[t % WIDTH]) for t in tokens[1:]]

    def close(self) -> None: ...

    def _sum(self, values: np.ndarray) -> np.ndarray:
        """Over the ranks; the parts do not overlap, so the sum is exact. Waits for every rank."""
        if self.world_size == 1:
            return values
        import torch
        import torch.distributed as dist

        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    def _strike(self, method: str, step: int) -> str | None:
        return _strike(self.run_dir, method, step) if self.rank == self.world_size - 1 else None
