"""The rollout process: engine, tokenizer, graders and data set wired together. A plain class with JSON in and out.

    run(step) ──► committed already? return it ──► else draw, generate, grade ──► rollouts/step-N (atomic) ──► manifest

Nothing is decided here: the step is `k31core.rollout.episode`, the engine is behind its protocol, commits are
`k31core.checkpoint`.
"""

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k31core.checkpoint import commit as commits
from k31core.checkpoint.store import step_name
from k31core.grading.pool import GraderPool
from k31core.observe.progress import ProgressFile
from k31core.recipe.load import ResolvedRecipe, resolve
from k31core.recipe.recipe import Recipe
from k31core.rollout.data import PreparedSplit, PromptStream
from k31core.rollout.engine import EngineError, EngineHealth
from k31core.rollout.episode import StepPlan, StepResult, run_step
from k31core.rollout.evaluation import EvalPlan, Evaluation, evaluate, table_file, write_table
from k31core.rollout.factory import build_engine
from k31core.rollout.noted import NotedEngine
from k31core.rollout.records import write_groups
from k31core.rollout.reward import Rewarder
from k31core.rollout.step_metrics import step_metrics
from k31core.rollout.text import TextCodec
from k31core.sync.files import file_publisher
from k31core.workers.sync_sink import SyncSink

KIND = "rollout"
TRAIN_DIR, HELDOUT_DIR = "train", "heldout"
"""Prepared splits inside the run's data directory."""


class RolloutWorker:
    """See the module. Methods may be called at the same time from one event loop; `run` and `evaluate` take turns."""

    def __init__(
        self, recipe_json: str, run_dir: str, model_dir: str, data_dir: str, evaluate_only: bool = False
    ) -> None:
        """recipe_json: a recipe, or a resolved one. data_dir: the prepared data sets of the run.

        `evaluate_only`: for `k31 eval`, which has a held-out set and no training prompts.
        """
        self._resolved = parse_recipe_json(recipe_json)
        self._evaluate_only = evaluate_only
        self._run_dir, self._model_dir, self._data_dir = Path(run_dir), Path(model_dir), Path(data_dir)
        self._parts: _Parts | None = None
        self._adapter_digest: str | None = None
        self._sink: SyncSink | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> dict[str, Any]:
        """Open everything: tokenizer and data first, since they fail fastest. Call before anything else."""
        recipe = self._resolved.recipe
        codec = TextCodec.load(self._model_dir, trust_remote_code=recipe.model.trust_remote_code)
        train = None if self._evaluate_only else PreparedSplit.open(self._data_dir / TRAIN_DIR)
        heldout = None if recipe.data.heldout is None else PreparedSplit.open(self._data_dir / HELDOUT_DIR)
        built = await build_engine(self._resolved, self._model_dir, log_dir=self._run_dir / "logs")
        engine = NotedEngine(built, ProgressFile(self._run_dir, "engine").note)
        reward = recipe.reward
        pool = GraderPool(
            workers=reward.workers,
            wall_limit_s=reward.wall_limit_s,
            cpu_limit_s=reward.cpu_limit_s,
            memory_limit_mb=reward.memory_limit_mb,
        )
        stream = None if train is None else PromptStream(train, recipe.seed, recipe.data.shuffle)
        self._parts = _Parts(engine, Rewarder(pool, codec, reward), pool, stream, heldout)
        return {
            "train_prompts": 0 if train is None else len(train),
            "heldout_prompts": 0 if heldout is None else len(heldout),
        }

    async def run(
        self, step: int, cursor: dict[str, Any] | None, policy_version: int, adapter_dir: str | None
    ) -> dict[str, Any]:
        """The samples of `step`, drawn from `cursor` with adapter `policy_version`, committed; returns the manifest.

        A directory committed for the same step, cursor, version and adapter is returned as it is; another one is set
        aside.
        """
        async with self._turn:
            parts = self._ready
            if parts.train is None:
                raise ValueError("this rollout worker was started for an evaluation: it has no training prompts")
            await self._serve(policy_version, adapter_dir)
            final = self._run_dir / "rollouts" / step_name(step)
            origin = {
                "step": step,
                "policy_version": policy_version,
                "engine_adapter_digest": self._adapter_digest,
                "cursor_before": cursor,
            }
            manifest = _committed(final, origin)
            if manifest is None:
                plan = StepPlan.of(self._resolved.recipe, step, policy_version, parts.rewarder.codec.stop_token_ids)
                begun = time.perf_counter()
                result = await run_step(plan, parts.engine, parts.rewarder, parts.train, cursor)
                metrics = step_metrics(result, seconds=time.perf_counter() - begun, devices=self._devices)
                metrics["reward/grader_kills"] = float(parts.pool.kills)
                manifest = await asyncio.to_thread(_commit, final, origin, result, metrics)
            return _reply(final, manifest)

    async def evaluate(self, step: int, policy_version: int) -> dict[str, float]:
        """Answer and grade the held-out set; returns `eval/…` metrics. The table goes to `evaluation.table_file`."""
        async with self._turn:
            parts, recipe = self._ready, self._resolved.recipe
            if parts.heldout is None:
                raise ValueError("the recipe has no held-out data set (data.heldout): nothing to evaluate")
            begun = time.perf_counter()
            plan = EvalPlan.of(recipe, policy_version, parts.rewarder.codec.stop_token_ids)
            count = min(len(parts.heldout), recipe.eval.max_prompts or len(parts.heldout))
            prompts = [parts.heldout.prompt(row) for row in range(count)]
            result = await evaluate(plan, parts.engine, parts.rewarder, prompts)
            result = Evaluation({**result.metrics, "perf/eval_time": time.perf_counter() - begun}, result.table)
            facts = {
                "step": step,
                "policy_version": policy_version,
                "adapter_digest": self._adapter_digest,
                "data": recipe.data.heldout.model_dump(mode="json") if recipe.data.heldout else None,
                "data_digest": parts.heldout.manifest["digest"],
                "samples_per_prompt": plan.samples,
                "temperature": plan.params.temperature,
            }
            write_table(table_file(self._run_dir, recipe.eval, step, asked=self._evaluate_only), result, facts)
            return result.metrics

    async def load_adapter(self, directory: str, version: int) -> dict[str, Any]:
        """Serve an adapter directory as `version`; returns its digest and bytes. Raises SyncError with the reason."""
        published = await file_publisher(self._ready.engine, self._resolved.recipe).publish(Path(directory), version)
        self._adapter_digest = published.digest
        return {"digest": published.digest, "version": version, "bytes": published.bytes}

    async def sync(self, action: str, *arguments: Any) -> Any:
        """An action of `SyncSink`: the engine's side of a sync by memory."""
        if self._sink is None:
            text = json.loads((self._model_dir / "config.json").read_bytes())["text_config"]
            self._sink = SyncSink(self._ready.engine.inner, self._resolved.recipe, int(text["num_experts"]))
        if action in ("handles", "receive"):
            self._adapter_digest = arguments[2]
        return await getattr(self._sink, action)(*arguments)

    async def score(self, tokens: list[int]) -> list[float]:
        """Log-probs `[n - 1]` of a fixed sequence with the current adapter: the canary."""
        return list(await self._ready.engine.score(tuple(tokens)))

    async def health(self) -> dict[str, Any]:
        """Fields of EngineHealth; not alive before `start`."""
        if self._parts is None:
            return asdict(EngineHealth(False, -1, 0, 0, False, "not started"))
        return asdict(await self._parts.engine.health())

    async def sleep(self) -> None:
        """Free what training needs."""
        await self._ready.engine.sleep()

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._ready.engine.wake()

    async def close(self) -> None:
        """Stop engine and graders. Idempotent."""
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.engine.close()
            await asyncio.to_thread(parts.pool.close)

    @property
    def _ready(self) -> "_Parts":
        if self._parts is None:
            raise EngineError("the rollout worker is not started: call start() first")
        return self._parts

    @property
    def _devices(self) -> int:
        """Devices that generate: one for the embedded engine."""
        return self._resolved.recipe.rollout.engine.tp_size

    async def _serve(self, policy_version: int, adapter_dir: str | None) -> None:
        """Load `adapter_dir` unless the engine serves `policy_version` already."""
        seen = (await self._ready.engine.health()).policy_version
        if seen == policy_version:
            return
        if adapter_dir is None:
            raise EngineError(
                f"adapter version {policy_version} is wanted, the engine serves {seen}, and no directory is given"
            )
        await self.load_adapter(adapter_dir, policy_version)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `start` opened."""

    engine: NotedEngine
    rewarder: Rewarder
    pool: GraderPool
    train: PromptStream | None
    heldout: PreparedSplit | None


def _count(split: PreparedSplit | None) -> int:
    return 0 if split is None else len(split)


def parse_recipe_json(text: str) -> ResolvedRecipe:
    """A recipe as JSON, resolved or not."""
    tree = json.loads(text)
    if isinstance(tree, dict) and "recipe" in tree:
        return ResolvedRecipe.model_validate(tree)
    return resolve(Recipe.model_validate(tree))


def _committed(final: Path, origin: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a whole rollout with this origin; what is there otherwise is set aside."""
    if not commits.is_committed(final):
        return None
    try:
        manifest = commits.verify_directory(final)
    except commits.CommitError:
        commits.set_aside(final, "bad")
        return None
    if {key: manifest["facts"].get(key) for key in origin} != json.loads(json.dumps(origin)):
        commits.set_aside(final, "stale")
        return None
    return manifest


def _commit(final: Path, origin: dict[str, Any], result: StepResult, metrics: dict[str, float]) -> dict[str, Any]:
    facts = {**origin, "cursor": result.cursor, "metrics": metrics, "prompts": [d.record() for d in result.drawn]}
    with commits.staged(final, KIND, facts) as staging:
        write_groups(staging, result.groups)
    return commits.read_manifest(final)


def _reply(final: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    facts = manifest["facts"]
    return {
        "step": facts["step"],
        "directory": str(final),
        "files": manifest["files"],
        "metrics": facts["metrics"],
        "cursor": facts["cursor"],
        "prompts": facts["prompts"],
    }
