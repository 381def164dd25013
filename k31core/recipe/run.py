"""What surrounds the loop: saves, sync, cluster, logging."""

from typing import Literal, Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section


class SaveRecipe(Section):
    """Adapter saves in the run directory."""

    interval: int = Field(5, ge=1)
    """Steps between saves; the last step is always saved."""
    optimizer: bool = True
    """Save the Adam state too: needed for an exact resume (294 GB at full size)."""
    keep_last: int = Field(2, ge=1)
    keep_every: int = Field(0, ge=0)
    """Also keep every Nth step for good; 0 keeps only the last ones."""
    keep_rollouts: int = Field(2, ge=1)
    """Rollout directories kept beyond the last commit."""
    skip_saving: bool = False


class SyncRecipe(Section):
    """How a new adapter version reaches the engine."""

    transport: Literal["in_process", "shared_files", "cuda_ipc", "nccl"] = "cuda_ipc"
    shared_dir: str | None = None
    """For `shared_files`: a directory that the engines see; None when they see the run directory."""
    bucket_bytes: int = Field(2 * 1024**3, ge=1)
    resend_base: bool = False
    """Send the frozen base at every sync (when the host has no room for a copy of it)."""
    expert_rows: Literal["own", "all"] = "own"
    """Of the per-expert factors, each engine rank gets its own experts' rows, or all (SGLang's releases load all)."""
    check_lora_weight_equal: bool = False
    """Compare every tensor on both sides, byte for byte; cheap digests are always compared."""
    canary_tokens: int = Field(16, ge=0)
    """Length of the fixed trajectory scored by trainer and engine after each sync; 0 is off."""
    timeout_s: float = Field(1800.0, gt=0)


class ClusterRecipe(Section):
    """The machines: Ray resources, deadlines, InfiniBand."""

    num_nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    accelerator: str | None = None
    """Expected card, e.g. `H200`; a node with another one is refused."""
    host_memory_gb: float | None = Field(None, gt=0)
    """Memory of each host; `k31 plan` checks against it. None: not judged."""
    colocate: bool = True
    """Trainer and engine share the cards."""
    bringup_timeout_s: float = Field(300.0, gt=0)
    cpus_per_trainer: float = Field(1.0, gt=0)
    cpus_per_engine: float = Field(1.0, gt=0)
    min_hcas_per_node: int = Field(0, ge=0)
    """Fewer healthy InfiniBand ports than this on any node stops the run."""
    readmit_hcas: bool = False
    """Use ports again that an earlier start of this run left out and that are up now."""
    infiniband_root: str = "/sys/class/infiniband"
    """Where each node reads its ports."""
    all_reduce_check_mb: int = Field(64, ge=0)
    """Size of the all-reduce over the trainer ranks at bring-up, per node and over all; 0 skips it."""
    min_all_reduce_gb_per_s: float | None = Field(None, gt=0)
    """Least bus bandwidth of the all-reduce over all ranks; None reports it only."""
    phase_timeout_s: float = Field(7200.0, gt=0)
    """A rollout, train or sync phase longer than this is a hang."""
    silence_timeout_s: float = Field(1800.0, gt=0)
    """No sign of life (a microbatch, an answer) from any worker for this long within a phase is a hang, too."""
    max_attempts_without_progress: int = Field(2, ge=1)


class ObserveRecipe(Section):
    """Where metrics go besides `metrics.jsonl`."""

    wandb: bool = True
    """Offline without a key."""
    wandb_project: str = "k31"
    prefect_artifacts: bool = True


class EnvRecipe(Section):
    """Environment of trainer and engine processes."""

    variables: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in self.variables.items():
            if name == "NCCL_IB_HCA" and value.startswith("^") and not value.startswith("^="):
                raise ValueError(
                    f"env.variables.NCCL_IB_HCA = {value!r} is a prefix match (^mlx5_1 drops mlx5_10 too): "
                    f"write ^={value[1:]}"
                )
        return self
