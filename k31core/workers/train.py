"""One trainer rank as a process: a plain class that the cluster hosts in an actor. JSON in, JSON out.

    start -> restore -> train, train, ... with export between -> close

It reads committed rollouts and writes into directories that the caller commits, so it never decides what is kept.
"""

import platform
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from k31core.checkpoint.adapter import WEIGHTS_FILE
from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.checkpoint.commit import sha256_file
from k31core.observe.metrics import ALLOCATED_AFTER_SYNC_MB, TRAIN_TIME
from k31core.observe.progress import ProgressFile
from k31core.parallel.bandwidth import measure_nodes
from k31core.parallel.cpu_device import cpu_device
from k31core.parallel.groups import build_mesh, first_complaint, init_process_group
from k31core.parallel.mesh import SINGLE, Mesh
from k31core.recipe.recipe import Recipe
from k31core.rl.advantages import group_advantages, shuffled_advantages
from k31core.rl.types import FinishReason, Group
from k31core.rollout.records import read_groups
from k31core.train.flops import train_flops
from k31core.train.offload import FrozenOffload
from k31core.train.samples import TrainSample
from k31core.train.trainer import Trainer, build_trainer, describe
from k31core.workers.sync_source import SyncSource


class StepOrderError(ValueError):
    """A step was asked for that does not follow the one in memory: restore first."""


class TrainWorker:
    """See the module. Its methods run one at a time, in one thread."""

    def __init__(
        self, recipe_json: str, run_dir: str, model_dir: str, rank: int, world_size: int, init_method: str
    ) -> None:
        """recipe_json: the recipe (not the resolved one). init_method: torch's rendezvous; unused with one rank."""
        self._recipe = Recipe.model_validate_json(recipe_json)
        self._run_dir, self._model_dir = Path(run_dir), Path(model_dir)
        self._rank, self._world_size, self._init_method = rank, world_size, init_method
        self._trainer: Trainer | None = None
        self._context = ExitStack()
        self._source: SyncSource | None = None
        self._frozen: FrozenOffload | None = None
        self._digest = (-1, "")
        """(step, digest) that was computed last."""

    def start(self) -> dict[str, Any]:
        """Join the other ranks and load this rank's part of the checkpoint. Call `restore` next."""
        train = self._recipe.train
        torch.set_num_threads(train.threads)  # bits depend on it
        if train.device == "cuda":
            torch.cuda.set_device(self._rank % torch.cuda.device_count())
        mesh = self._join()
        self._trainer, report = build_trainer(self._recipe, self._model_dir, mesh=mesh)
        progress = ProgressFile(self._run_dir, f"trainer-{self._rank}")
        self._trainer.decoder.register_forward_hook(lambda *_: progress.note("a microbatch's forward pass"))
        return {
            "rank": self._rank,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "seconds": round(report.seconds, 3),
            "trained_parameters": sum(slot.tensor.numel() for slot in self._trainer.optimizer.slots),
        }

    def measure_network(self) -> list[dict[str, Any]]:
        """All-reduces over the ranks, inside each node and over all; the same on every rank. Raises BandwidthError."""
        cluster = self._recipe.cluster
        results = measure_nodes(
            platform.node(),
            num_bytes=cluster.all_reduce_check_mb * 2**20,
            device=self._recipe.train.device,
            minimum_gb_per_s=cluster.min_all_reduce_gb_per_s,
        )
        return [result.to_json() for result in results]

    def step(self) -> int:
        """Optimizer steps in this rank's memory."""
        return self._ready.steps_done

    def restore(self, adapter_dir: str | None) -> dict[str, Any]:
        """Continue from a committed adapter directory; None: a fresh adapter, or the recipe's warm start."""
        self._digest = (-1, "")
        restored = self._ready.fresh() if adapter_dir is None else self._ready.restore(Path(adapter_dir))
        return describe(restored)

    def train(self, step: int, rollout_dir: str) -> dict[str, Any]:
        """Take optimizer step `step` (counted from 1) on a committed rollout; on an error nothing has changed."""
        trainer = self._ready
        if step != trainer.steps_done + 1:
            raise StepOrderError(
                f"step {step} was asked for, but {trainer.steps_done} steps are in memory: restore first"
            )
        begun = time.perf_counter()
        groups = read_groups(Path(rollout_dir))
        samples = train_samples(groups, self._recipe, step)
        device = trainer.decoder.build.device
        # What is allocated now is what the last sync left: it must come back to its baseline every step.
        left = {ALLOCATED_AFTER_SYNC_MB: torch.cuda.memory_allocated() / 2**20} if device.type == "cuda" else {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = trainer.train(samples)
        digest = self.digest()
        seconds = time.perf_counter() - begun
        flops = train_flops(trainer.decoder.config, [sample.tokens for sample in samples])
        metrics: dict[str, float] = {
            **result.metrics,
            TRAIN_TIME: seconds,
            "perf/actor_train_tflops": flops / seconds / self._world_size / 1e12,
            **_memory_peaks(device),
            **left,
        }
        return {"step": step, "metrics": metrics, "adapter_digest": digest, "proof": result.proof}

    def export(self, step: int, out_dir: str, optimizer: bool) -> dict[str, Any]:
        """Write adapter, trainer state and (on request) optimizer into `out_dir`, which the caller commits."""
        trainer, directory = self._ready, Path(out_dir)
        if step != trainer.steps_done:
            raise StepOrderError(f"step {step} was asked for, but {trainer.steps_done} steps are in memory")
        trainer.export(directory, optimizer=optimizer)
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()] if self._rank == 0 else []
        return {
            "step": step,
            "adapter_digest": digest_of_file(directory / WEIGHTS_FILE) if self._rank == 0 else None,
            "files": [
                {
                    "path": path.relative_to(directory).as_posix(),
                    "size": path.stat().st_size,
                    "sha256": sha256_file(path),
                }
                for path in files
            ],
        }

    def digest(self) -> str:
        """Digest of the adapter in memory; computed once a step."""
        step, known = self._digest
        if step != self._ready.steps_done:
            known = self._ready.digest()
            self._digest = (self._ready.steps_done, known)
        return known

    def offload(self) -> int:
        """The engine needs the card: the frozen weights go to the host; returns the bytes that left."""
        if self._frozen is None:
            self._frozen = FrozenOffload(self._ready.decoder)
        return self._frozen.offload()

    def onload(self) -> int:
        """The engine sleeps: the frozen weights come back. Call it before `train` and `score`."""
        return 0 if self._frozen is None else self._frozen.onload()

    def sync(self, action: str, *arguments: Any) -> Any:
        """An action of `SyncSource`: this rank's part of a sync by memory."""
        if self._source is None:
            self._source = SyncSource(self._ready.decoder, self._recipe, self._rank)
        return getattr(self._source, action)(*arguments)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs `[n - 1]` of a fixed sequence at temperature 1: the canary."""
        return self._ready.score(tokens)

    def close(self) -> None:
        """Leave the process group and free the model. Idempotent."""
        self._trainer = self._source = self._frozen = None
        self._context.close()

    @property
    def _ready(self) -> Trainer:
        if self._trainer is None:
            raise StepOrderError("the trainer is not started: call `start` first")
        return self._trainer

    def _join(self) -> Mesh:
        """The mesh of this rank; process groups only where there are several ranks."""
        if self._world_size == 1:
            return SINGLE
        train = self._recipe.train
        self._context.enter_context(cpu_device())
        backend = "nccl" if train.device == "cuda" else "gloo"
        minutes = train.distributed_timeout_minutes
        init_process_group(backend, self._init_method, self._rank, self._world_size, minutes)
        self._context.callback(torch.distributed.destroy_process_group)
        mesh = build_mesh(train.parallel, timeout_minutes=max(1, round(minutes)))
        first_complaint(None)  # every rank is here
        return mesh


def train_samples(groups: Sequence[Group], recipe: Recipe, step: int) -> list[TrainSample]:
    """The groups' samples with their advantages. Aborted answers are masked; their rewards count in no baseline."""
    samples = []
    for group in groups:
        kept = [s for s in group.samples if s.completion.finish is not FinishReason.ABORT]
        where = f"step {step}, group of prompt {group.prompt.prompt_id[:12]}"
        advantages = group_advantages([s.reward for s in kept], where)
        if recipe.algorithm.shuffle_advantages:
            advantages = shuffled_advantages(advantages, recipe.seed, step, group.samples[0].group)
        by_id = {s.sample_id: float(a) for s, a in zip(kept, advantages)}
        for sample in group.samples:
            completion = sample.completion
            samples.append(
                TrainSample(
                    sample_id=sample.sample_id,
                    prompt=_int32(sample.prompt.tokens),
                    response=completion.tokens,
                    logprobs=completion.logprobs,
                    top_ids=completion.top_ids,
                    top_logprobs=completion.top_logprobs,
                    routing=completion.routing,
                    selection=completion.selection,
                    advantage=by_id.get(sample.sample_id, 0.0),
                    masked=sample.sample_id not in by_id,
                )
            )
    return samples


def _int32(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(tokens, dtype=np.int32)


def _memory_peaks(device: torch.device) -> dict[str, float]:
    """Peaks of this process, in MiB."""
    peaks = {"memory/train_host_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if device.type == "cuda":
        peaks["memory/train_gpu_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return peaks
