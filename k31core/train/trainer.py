"""The trainer of one rank: decoder with adapter, optimizer, step count; built from plain pieces, saved and restored.

build -> (restore | fresh adapter) -> step, step, ... -> export into a directory the caller commits
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k31core.checkpoint.adapter import WEIGHTS_FILE, AdapterConfig, load_adapter, read_adapter_config
from k31core.checkpoint.finite import read_header
from k31core.checkpoint.native import LoadReport
from k31core.checkpoint.optimizer_state import (
    OPTIMIZER_DIR,
    OptimizerStateError,
    has_optimizer_state,
    read_optimizer_state,
)
from k31core.model.build import LORA_TARGETS, Build, ExpertFormat, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.layout import check_layout
from k31core.model.lora import adapter_shapes, init_adapter, trainable_slots
from k31core.model.weight_names import adapter_slots
from k31core.parallel.groups import first_complaint
from k31core.parallel.mesh import SINGLE, Mesh, stage_layers
from k31core.parallel.sharding import Slot
from k31core.recipe.errors import RecipeError
from k31core.recipe.model import torch_dist_dir
from k31core.recipe.recipe import Recipe
from k31core.rl.candidates import CandidateMode
from k31core.rl.losses import LossChoice
from k31core.rl.score_centering import Weighting
from k31core.train.adamw import AdamSettings, AdamW, AdapterOptimizer
from k31core.train.base_weights import load_native, load_reference
from k31core.train.batch import loss_token_count, make_microbatches
from k31core.train.canary import score_sequence
from k31core.train.logical import adapter_digest, export_adapter, export_optimizer, world
from k31core.train.pipeline import run_pipelined
from k31core.train.samples import SampleLimits, TrainSample
from k31core.train.state import (
    LrSchedule,
    SavedState,
    read_trainer_state,
    rng_state,
    set_rng_state,
    write_trainer_state,
)
from k31core.train.step import Schedule, StepResult, StepSettings, optimizer_step

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ResumeError(ValueError):
    """An adapter that this run cannot continue from: names the two values that disagree."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore found, in words for the log and for the user."""

    step: int
    restored: tuple[str, ...]
    not_restored: tuple[str, ...]


class Trainer:
    """One rank's trainer. Its methods run in one thread."""

    def __init__(
        self, decoder: Decoder, recipe: Recipe, optimizer: AdapterOptimizer, schedule: Schedule | None = None
    ) -> None:
        """`decoder` has its base loaded; the adapter is still empty: call `fresh` or `restore` first."""
        self.decoder = decoder
        self.optimizer = optimizer
        self.steps_done = 0
        self._recipe = recipe
        self._schedule = schedule
        self._lr = LrSchedule(recipe.train.optimizer.lr, recipe.train.optimizer.warmup_steps)
        self._limits = sample_limits(decoder, recipe)
        self._settings = StepSettings(
            choice=loss_choice(recipe),
            temperature=recipe.rollout.temperature,
            logprob_chunk_tokens=recipe.train.logprob_chunk_tokens,
            clip_grad=recipe.train.optimizer.clip_grad,
        )
        self._prove = True

    def fresh(self) -> Restored:
        """A new adapter: A from the seed, B zero; or the recipe's warm start."""
        torch.manual_seed(self._recipe.seed)
        self.steps_done, self._prove = 0, True
        warm = self._recipe.train.lora.warm_start
        if warm is None:
            init_adapter(self.decoder)
            self.optimizer.reset()
            return Restored(0, (), ("fresh adapter: A from the seed, B zero",))
        self._load_adapter(Path(warm))
        self.optimizer.reset()
        return Restored(0, (f"adapter (warm start from {warm})",), ("step", "optimizer", "random state"))

    def restore(self, directory: Path) -> Restored:
        """Continue from a committed adapter directory; what it lacks is named, never made up silently."""
        saved = read_trainer_state(directory)
        if saved is not None and saved.schedule != self._lr:
            raise ResumeError(
                f"{directory}: saved with learning-rate schedule {saved.schedule}, this run has {self._lr}: "
                "use the run's own recipe, or train.lora.warm_start for a new run"
            )
        self._load_adapter(directory)
        self.optimizer.reset()
        restored, missing = ["adapter"], []
        if saved is None:
            missing += ["step (counting from 0)", "random state"]
        else:
            self.steps_done = saved.step
            set_rng_state(saved.rng)
            restored += ["step", "learning-rate schedule", "random state"]
        if has_optimizer_state(directory / OPTIMIZER_DIR):
            self.optimizer.updates = read_optimizer_state(directory / OPTIMIZER_DIR, self.optimizer.state_slots())
            restored.append("optimizer")
        else:
            missing.append("optimizer (Adam moments start from zero: the next updates differ from an unbroken run)")
        self._prove = self.steps_done == 0
        return Restored(self.steps_done, tuple(restored), tuple(missing))

    def train(self, samples: Sequence[TrainSample]) -> StepResult:
        """One optimizer step over all samples of the rollout. On an error nothing has changed."""
        mesh = self.decoder.build.mesh
        batches = make_microbatches(
            samples, self._limits, mesh=mesh, tokens_per_gpu=self._recipe.train.max_tokens_per_gpu
        )
        result = optimizer_step(
            self.decoder,
            self.optimizer,
            batches,
            self._settings,
            normaliser=loss_token_count(samples),
            lr=self._lr.at(self.steps_done),
            schedule=self._schedule,
            prove=self._prove,
        )
        self.steps_done += 1
        # A step in which nothing could be learnt proves nothing: the next one is asked again.
        self._prove = self._prove and result.proof is None
        return result

    def export(self, directory: Path, *, optimizer: bool) -> None:
        """Write adapter, trainer state and (on request) optimizer state into an existing directory.

        A collective: every rank calls it on a directory all of them see.
        """
        rank, _ = world(self.decoder)
        export_adapter(self.decoder, adapter_config(self._recipe), directory, first_complaint)
        own: OSError | OptimizerStateError | None = None
        try:
            if rank == 0:
                write_trainer_state(directory, SavedState(self.steps_done, self._lr, rng_state()))
            if optimizer:
                export_optimizer(self.decoder, self.optimizer, directory)
        except (OSError, OptimizerStateError) as error:
            own = error
        # a fault of one rank is everybody's, and nobody reports a file that another rank is still writing
        seen = first_complaint(None if own is None else str(own))
        if own is not None:
            raise own
        if seen is not None:
            raise OptimizerStateError(seen)

    def digest(self) -> str:
        """Digest of the logical adapter in memory. A collective."""
        return adapter_digest(self.decoder)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs `[n - 1]` of a fixed sequence with the current adapter at temperature 1 (the canary). A
        collective."""
        return score_sequence(self.decoder, tokens, chunk=self._settings.logprob_chunk_tokens)

    def _load_adapter(self, directory: Path) -> None:
        found, wanted = read_adapter_config(directory), adapter_config(self._recipe)
        if (found.rank, found.alpha) != (wanted.rank, wanted.alpha):
            raise ResumeError(
                f"{directory}: adapter has rank {found.rank} and alpha {found.alpha:g}, "
                f"the recipe has train.lora.rank {wanted.rank} and alpha {wanted.alpha:g}"
            )
        self._check_targets(directory, found, wanted)
        load_adapter(directory, adapter_slots(self.decoder), partial=self.decoder.build.mesh.pp.size > 1)

    def _check_targets(self, directory: Path, found: AdapterConfig, wanted: AdapterConfig) -> None:
        """The file has exactly the tensors of this run's target set; a pipeline stage sees only its own layers."""
        lora = self.decoder.build.lora
        assert lora is not None
        ours = set(adapter_shapes(self.decoder.config, lora))
        theirs = set(read_header(directory / WEIGHTS_FILE)[0])
        if ours == theirs:
            return
        first = min(ours ^ theirs)
        raise ResumeError(
            f"{directory}: {len(theirs)} adapter tensors (target_modules {found.targets or 'all-linear'}), this run "
            f"has {len(ours)} (train.lora.target_modules {wanted.targets or 'all-linear'}); {first} is only in "
            f"{'the file' if first in theirs else 'this run'}"
        )


def build_trainer(recipe: Recipe, model_dir: Path, *, mesh: Mesh = SINGLE) -> tuple[Trainer, LoadReport]:
    """Decoder from `model_dir` (checked by name, shape and dtype), adapter memory, AdamW; then see `Trainer`.

    With `model.ref_load: torch_dist` only the configuration is read from `model_dir`, the weights from the BF16
    torch_dist directory beside it.
    """
    packed = recipe.model.ref_load == "native"
    config = load_config(model_dir)
    if recipe.rollout.indexer_replay and config.dsa is None:
        raise RecipeError(
            f"rollout.indexer_replay is on, but {model_dir} is a {config.family} checkpoint: no DSA indexer"
        )
    if config.family != recipe.model.family:
        raise ResumeError(
            f"{model_dir}: a {config.family} checkpoint, the recipe says model.family {recipe.model.family}"
        )
    device = torch.device("cpu") if recipe.train.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    lora = recipe.train.lora
    build = Build(
        mesh=mesh,
        dtype=_DTYPES[recipe.model.dtype],
        device=device,
        lora=LoraSpec(
            rank=lora.rank,
            alpha=lora.alpha,
            targets=LORA_TARGETS if lora.target_modules == "all-linear" else lora.target_modules,
            tie_gate_up=lora.tie_gate_up,
            seed=recipe.seed,
        ),
        row_multiple=recipe.rollout.engine.row_multiple,
        experts=ExpertFormat.PACKED if packed else ExpertFormat.DENSE,
        recompute=recipe.train.recompute,
    )
    layout = recipe.train.parallel
    check_layout(config, layout)
    stages = stage_layers(config.num_hidden_layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)
    decoder = Decoder(config, build, stages[mesh.pp.rank])
    if packed:
        report = load_native(decoder, model_dir)
    else:
        report = load_reference(decoder, torch_dist_dir(model_dir), source=model_dir)
    optimizer = build_optimizer(recipe, trainable_slots(decoder))
    return Trainer(decoder, recipe, optimizer, run_pipelined if mesh.pp.size > 1 else None), report


def build_optimizer(recipe: Recipe, slots: Sequence[Slot]) -> AdapterOptimizer:
    """Plain AdamW, or with a share of the state on the host when the recipe says so (GPU only: the recipe checks)."""
    adam = recipe.train.optimizer
    settings = AdamSettings(adam.beta1, adam.beta2, adam.eps, adam.weight_decay)
    if adam.cpu_offload_fraction == 0:
        return AdamW(slots, settings)
    from k31core.train.hybrid import HybridAdamW  # imports megatron-core

    return HybridAdamW(
        slots,
        settings,
        offload_fraction=adam.cpu_offload_fraction,
        overlap=adam.overlap_d2h_h2d,
        precision_aware=adam.precision_aware,
    )


def adapter_config(recipe: Recipe) -> AdapterConfig:
    """What `adapter_config.json` of this recipe says."""
    lora = recipe.train.lora
    return AdapterConfig(lora.rank, lora.alpha, None if lora.target_modules == "all-linear" else lora.target_modules)


def loss_choice(recipe: Recipe) -> LossChoice:
    """The recipe's loss with its plain numbers; the candidate mode follows from the sampling."""
    return LossChoice(
        kind=recipe.algorithm.loss,
        weighting=Weighting(recipe.algorithm.importance),
        mode=CandidateMode(recipe.candidate_mode),
        clip_low=recipe.algorithm.clip_low,
        clip_high=recipe.algorithm.clip_high,
    )


def sample_limits(decoder: Decoder, recipe: Recipe) -> SampleLimits:
    """What a sample must satisfy for this model and recipe."""
    config = decoder.config
    return SampleLimits(
        vocab_size=config.vocab_size,
        max_tokens=recipe.train.max_tokens_per_gpu * recipe.train.parallel.cp,
        candidates=recipe.rollout.top_logprobs_num,
        moe_layers=tuple(i for i in range(config.num_hidden_layers) if config.is_moe(i)),
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_token,
        replay_routing=recipe.rollout.routing_replay,
        replay_selection=recipe.rollout.indexer_replay,
        index_layers=0 if config.dsa is None else len(config.mla_layers),
        index_topk=0 if config.dsa is None else config.dsa.topk,
        whole_support=CandidateMode(recipe.candidate_mode) is CandidateMode.SUPPORT,
    )


def describe(restored: Restored) -> dict[str, Any]:
    """JSON form."""
    return {
        "step": restored.step,
        "restored": list(restored.restored),
        "not_restored": list(restored.not_restored),
    }
