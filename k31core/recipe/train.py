"""Training: LoRA, optimizer, batch and the parallel layout."""

from typing import Literal, Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section


class LoraRecipe(Section):
    """The adapter: a bypass beside frozen weights, never merged."""

    rank: int = Field(32, ge=1)
    alpha: float = Field(64.0, gt=0)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """`all-linear`, or some of: q_a_proj, kv_a_proj_with_mqa, o_proj, mlp, shared_experts, experts."""
    experts_shared_outer: bool = True
    tie_gate_up: bool = False
    """One A for gate and up of dense and shared MLPs (exported twice under the two names)."""
    warm_start: str | None = None
    """Adapter directory to start from."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj", "mlp", "shared_experts", "experts"}
        if isinstance(self.target_modules, tuple):
            unknown = sorted(set(self.target_modules) - known)
            if unknown or not self.target_modules:
                raise ValueError(f"train.lora.target_modules has {unknown or 'no entry'}; known: {sorted(known)}")
        if not self.experts_shared_outer:
            raise ValueError("train.lora.experts_shared_outer is false: only shared outer factors are implemented")
        return self


class OptimizerRecipe(Section):
    """AdamW over the adapter, constant learning rate."""

    lr: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    warmup_steps: int = Field(0, ge=0)
    clip_grad: float = Field(1.0, gt=0)
    """Global gradient norm; the norm before clipping is `train/grad_norm`."""
    cpu_offload_fraction: float = Field(0.0, ge=0.0, le=1.0)
    overlap_d2h_h2d: bool = False
    precision_aware: bool = False


class ParallelRecipe(Section):
    """The trainer's layout. World size = TP · PP · CP · DP; the EP group lies inside TP · CP · DP of a stage."""

    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    etp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    first_stage_layers: int | None = Field(None, ge=1)
    last_stage_layers: int | None = Field(None, ge=1)
    sequence_parallel: bool = False
    virtual_pp: int | None = None

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.virtual_pp is not None:
            raise ValueError(
                "train.parallel.virtual_pp is set: a virtual pipeline without overlapped point-to-point calls is "
                "silently wrong in megatron-core 0.19.2; leave it out"
            )
        if self.etp != 1:
            raise ValueError(f"train.parallel.etp is {self.etp}: shared outer LoRA factors need expert-TP 1")
        stage = self.tp * self.cp * self.dp
        if stage % self.ep:
            raise ValueError(f"train.parallel.ep {self.ep} does not divide TP·CP·DP = {stage}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("train.parallel.sequence_parallel needs tp > 1")
        if self.pp == 1 and (self.first_stage_layers or self.last_stage_layers):
            raise ValueError("train.parallel.first_stage_layers/last_stage_layers need pp > 1")
        return self


class TrainRecipe(Section):
    """One optimizer step over the whole rollout."""

    backend: Literal["plain", "megatron"] = "megatron"
    """`plain` is one process without collectives; `megatron` any layout."""
    lora: LoraRecipe = LoraRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    parallel: ParallelRecipe = ParallelRecipe()
    max_tokens_per_gpu: int = Field(8192, ge=1)
    """Microbatches are packed up to this many tokens."""
    packing: Literal["thd"] = "thd"
    """Whole sequences packed end to end into one row of tokens; nothing else is implemented."""
    recompute: bool = True
    """Full activation recomputation, layer by layer."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at a time."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rank (part of the recipe: bits depend on it)."""
    device: Literal["cpu", "cuda"] = "cuda"
    distributed_timeout_minutes: float = Field(60.0, gt=0)
    colocate_memory_peak_device: Literal["gpu", "cpu"] = "gpu"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backend == "plain" and self.parallel.world_size != 1:
            raise ValueError(f"train.backend 'plain' is one process, the layout has {self.parallel.world_size} ranks")
        if self.device == "cpu" and self.optimizer.cpu_offload_fraction > 0:
            raise ValueError("train.optimizer.cpu_offload_fraction needs train.device 'cuda'")
        return self
