"""By hand, on one GPU: the rollout and train phases of `k31-1xh200`, without Ray or Prefect.

    python -m tests.gpu.run_1xh200 --out DIR [--set a.b=c ...] [--steps 2] [--eager] [--no-profile]

    random checkpoint ──► engine (embedded) ──► rollouts/step-N ──► TrainWorker ──► adapters/step-N ──► engine ──► ...

The trainer is the worker of every run; the rollout is the rollout worker's step (`run_step`, records, commit) on the
embedded engine, with prompts of random tokens and rewards by turns 0 and 1, since random weights answer nothing and no
tokenizer or grader is needed for speed. Prints tokens/s, TFLOP/s, memory and seconds of each phase, then a profile of
each. Needs torch, triton, numpy, safetensors, pydantic, pyyaml; fla-core for the fast KDA. On a CPU a shrunken model
runs through the same lines: `--set` the sizes (see `tests/gpu/test_run_1xh200.py`).
"""

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k31core.checkpoint import commit as commits
from k31core.convert.random_checkpoint import make_random_checkpoint
from k31core.model.config import load_config
from k31core.recipe.load import load_recipe
from k31core.recipe.recipe import Recipe
from k31core.rl.types import Completion, GradeReason, Prompt, Verdict
from k31core.rollout.engines.embedded.engine import EmbeddedEngine
from k31core.rollout.engines.embedded.from_recipe import embedded_options
from k31core.rollout.episode import StepPlan, StepResult, run_step
from k31core.rollout.records import write_groups
from k31core.train.flops import forward_flops
from k31core.workers.train import TrainWorker

PROFILE_ROWS = 15
PROFILED_TOKENS = 8
"""Answer length of the profiled rollout: every decoding step is alike, and a trace of all of them is large."""


class RandomPrompts:
    """A source of prompts of random tokens, all of the recipe's longest length."""

    def __init__(self, vocab: int, length: int, seed: int) -> None:
        self._vocab, self._length, self._seed = vocab, length, seed

    def draw(self, cursor: Any, count: int) -> tuple[list[Prompt], Any]:
        """The next `count` prompts; the cursor is the number of prompts drawn."""
        first = cursor or 0
        return [self.prompt(row, 0) for row in range(first, first + count)], first + count

    def prompt(self, row: int, epoch: int) -> Prompt:
        """The prompt of a row."""
        tokens = np.random.default_rng([self._seed, row]).integers(0, self._vocab, self._length)
        return Prompt(f"random-{row}", tuple(tokens.tolist()), "", row, epoch)


class RewardsByTurns:
    """Rewards 0 and 1 by turns of the sample's number, so that every group has a signal."""

    async def grade(self, completion: Completion, label: str) -> tuple[float, Verdict]:
        """By the last number of the request's name."""
        reward = int(completion.request_id.rsplit("-", 1)[1]) % 2
        return float(reward), Verdict(reward, None, GradeReason.CORRECT if reward else GradeReason.WRONG)


@dataclass(slots=True)
class Lab:
    """What the phases share."""

    recipe: Recipe
    run_dir: Path
    model_dir: Path
    engine: EmbeddedEngine
    trainer: TrainWorker
    prompts: RandomPrompts
    device: torch.device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="k31-1xh200")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, run directory and results go here")
    parser.add_argument("--steps", type=int, default=2, help="the first one compiles and warms up")
    parser.add_argument("--eager", action="store_true", help="decode without CUDA graphs")
    parser.add_argument("--no-profile", action="store_true")
    arguments = parser.parse_args()
    overrides = [*arguments.set, *(["rollout.engine.cuda_graphs=false"] if arguments.eager else [])]
    recipe = load_recipe(arguments.recipe, overrides)
    results = asyncio.run(measure(recipe, arguments.out, arguments.steps, profile=not arguments.no_profile))
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))


async def measure(recipe: Recipe, out: Path, steps: int, *, profile: bool) -> dict[str, Any]:
    """Everything; returns what was printed as numbers, by phase."""
    device = torch.device(recipe.train.device)
    run_dir, model_dir = out / "run", out / recipe.model.name
    run_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"device": _device_name(device), "torch": torch.__version__, "steps": []}
    if not (model_dir / "model.safetensors.index.json").is_file():
        assert recipe.model.random is not None
        with timed(device) as phase:
            phase["gb"] = make_random_checkpoint(recipe.model.random, recipe.model.family, model_dir, device) / 1e9
        results["checkpoint"] = show("checkpoint", phase)
    lab = await open_lab(recipe, run_dir, model_dir, device, results)
    try:
        cursor: Any = None
        for step in range(1, steps + 1):
            row, cursor = await one_step(lab, step, cursor)
            results["steps"].append(row)
        if profile:
            results["profiles"] = await profiles(lab, steps, cursor)
    finally:
        await lab.engine.close()
        lab.trainer.close()
    return results


async def open_lab(
    recipe: Recipe, run_dir: Path, model_dir: Path, device: torch.device, results: dict[str, Any]
) -> Lab:
    """Trainer and engine on one card; the engine serves the trainer's fresh adapter as version 0."""
    trainer = TrainWorker(recipe.model_dump_json(), str(run_dir), str(model_dir), 0, 1, "")
    with timed(device) as phase:
        phase.update({key: float(value) for key, value in trainer.start().items() if key != "rank"})
        trainer.restore(None)
    results["trainer"] = show("load trainer", phase)
    with timed(device) as phase:
        engine = await EmbeddedEngine.open(model_dir, embedded_options(recipe))
    results["engine"] = show("load engine", phase)
    vocab = load_config(model_dir).vocab_size
    prompts = RandomPrompts(vocab, recipe.data.max_prompt_tokens, recipe.seed)
    lab = Lab(recipe, run_dir, model_dir, engine, trainer, prompts, device)
    await sync(lab, 0)
    return lab


async def one_step(lab: Lab, step: int, cursor: Any) -> tuple[dict[str, Any], Any]:
    """Rollout, train, sync; the row of numbers and the cursor."""
    with timed(lab.device) as rollout:
        result = await draw(lab, step, cursor)
    rollout.update(rollout_numbers(lab, result, rollout["seconds"]))
    rollout["decode_graphs"] = float(graphs_of(lab.engine))
    show(f"step {step} rollout", rollout)
    directory = keep(lab, step, result)
    await lab.engine.sleep()
    with timed(lab.device) as train:
        reply = lab.trainer.train(step, str(directory))
    metrics = reply["metrics"]
    tokens = sum(len(s.prompt.tokens) + len(s.completion.tokens) for g in result.groups for s in g.samples)
    train.update(
        tokens=float(tokens),
        tokens_per_s=tokens / train["seconds"],
        tflops_per_s=metrics["perf/actor_train_tflops"],
        grad_norm=metrics["train/grad_norm"],
        logprob_abs_diff=metrics["train/train_rollout_logprob_abs_diff"],
    )
    show(f"step {step} train", train)
    await lab.engine.wake()
    synced = await sync(lab, step)
    return {"rollout": rollout, "train": train, "sync": synced}, result.cursor


async def draw(lab: Lab, step: int, cursor: Any, new_tokens: int | None = None) -> StepResult:
    """The samples of a step, all of them as long as the recipe allows (there is no stop token)."""
    plan = StepPlan.of(lab.recipe, step, (await lab.engine.health()).policy_version, ())
    if new_tokens is not None:
        plan = replace(plan, params=replace(plan.params, max_new_tokens=new_tokens))
    return await run_step(plan, lab.engine, RewardsByTurns(), lab.prompts, cursor)  # type: ignore[arg-type]


def keep(lab: Lab, step: int, result: StepResult) -> Path:
    """Commit the rollout as a run does; returns its directory."""
    final = lab.run_dir / "rollouts" / f"step-{step}"
    if commits.is_committed(final):
        commits.set_aside(final, "stale")
    with commits.staged(final, "rollout", {"step": step}) as staging:
        write_groups(staging, result.groups)
    return final


async def sync(lab: Lab, version: int) -> dict[str, float]:
    """The trainer's adapter to the engine through a directory."""
    directory = lab.run_dir / "adapters" / f"step-{version}"
    directory.mkdir(parents=True, exist_ok=True)
    with timed(lab.device) as phase:
        lab.trainer.export(version, str(directory), False)
        await lab.engine.load_adapter(directory, version)
    size = sum(path.stat().st_size for path in directory.iterdir())
    phase.update(gb=size / 1e9, gb_per_s=size / 1e9 / phase["seconds"])
    return show(f"sync of version {version} (files)", phase)


def rollout_numbers(lab: Lab, result: StepResult, seconds: float) -> dict[str, float]:
    """Tokens and operations: a prompt is computed once for all its samples, an answer's last token never."""
    config = load_config(lab.model_dir)
    prompt = sum(len(group.prompt.tokens) for group in result.groups)
    answers = [(len(g.prompt.tokens), len(s.completion.tokens)) for g in result.groups for s in g.samples]
    generated = sum(answer for _, answer in answers)
    flops = forward_flops(config, [len(group.prompt.tokens) for group in result.groups])
    for before, answer in answers:
        flops += forward_flops(config, [before + answer - 1]) - forward_flops(config, [before])
    return {
        "prompt_tokens": float(prompt),
        "generated_tokens": float(generated),
        "generated_tokens_per_s": generated / seconds,
        "tflops_per_s": flops / seconds / 1e12,
    }


async def profiles(lab: Lab, step: int, cursor: Any) -> dict[str, str]:
    """torch.profiler tables of a short rollout and of one training step, largest first."""
    tables = {}
    for name in ("rollout", "train"):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if lab.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        drawn = await draw(lab, step + 1, cursor, PROFILED_TOKENS) if name == "train" else None
        directory = keep(lab, step + 1, drawn) if drawn is not None else None
        profiler = torch.profiler.profile(activities=activities)
        if directory is None:  # operators are recorded in the thread that starts the profiler: the engine's
            await lab.engine._in_thread(profiler.start)
            await draw(lab, step + 1, cursor, PROFILED_TOKENS)
            await lab.engine._in_thread(profiler.stop)
        else:
            profiler.start()
            lab.trainer.train(step + 1, str(directory))
            profiler.stop()
        order = "self_cuda_time_total" if lab.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=PROFILE_ROWS, max_name_column_width=60)
        tables[name] = table
        print(f"\nprofile: {name} ({PROFILED_TOKENS} new tokens a sample)\n{table}", flush=True)
    return tables


@contextmanager
def timed(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds and memory peaks of the block, into the yielded record."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    phase: dict[str, float] = {}
    begun = time.perf_counter()
    with torch.cuda.device(0) if cuda else nullcontext():
        yield phase
    if cuda:
        torch.cuda.synchronize()
        phase["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        phase["gpu_left_gib"] = torch.cuda.memory_allocated() / 2**30
    phase["seconds"] = time.perf_counter() - begun
    phase["host_peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def show(name: str, phase: dict[str, float]) -> dict[str, float]:
    """Print one line a phase."""
    print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in phase.items()), flush=True)
    return phase


def graphs_of(engine: EmbeddedEngine) -> int:
    """Decoding steps captured by the engine."""
    core = engine._core
    graphs = None if core is None else core._graphs
    return 0 if graphs is None else graphs.count


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
