"""What every module of the decoder is built with: the mesh, dtypes, device, and whether a LoRA bypass is added."""

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from k31core.parallel.mesh import SINGLE, Mesh


class LoraTargetError(ValueError):
    """A LoRA target that is no module of this model."""


LORA_TARGETS = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", "mlp", "shared_experts", "experts")
"""`all-linear` for this family. Never adapted: KDA q/k/v, q_b, kv_b, g, router, latent projections, indexer,
embeddings."""


class ExpertFormat(StrEnum):
    """How routed experts lie in memory."""

    PACKED = "packed"
    """MXFP4 bytes, frozen."""
    DENSE = "dense"
    """Floating point, trainable: for pre-training the tiny checkpoint only."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter's shape."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = LORA_TARGETS
    tie_gate_up: bool = False
    """Gate and up of dense and shared MLPs share one A (still written under both names)."""
    dtype: torch.dtype | None = None
    """Of the factors; None: the model's."""
    seed: int = 0
    """A is drawn from (seed, logical name), so every layout starts from the same adapter."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(LORA_TARGETS))
        if unknown:
            raise LoraTargetError(f"LoRA targets {unknown} are unknown; known: {list(LORA_TARGETS)}")
        if self.rank < 1:
            raise LoraTargetError(f"LoRA rank must be at least 1, got {self.rank}")

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Build:
    """How to build the modules of one rank."""

    mesh: Mesh = SINGLE
    dtype: torch.dtype = torch.float32
    """Of frozen weights and activations; norm statistics, router, decay and log-probs are fp32 whatever this is."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lora: LoraSpec | None = None
    row_multiple: int = 8
    """Rows of every matrix product are padded to a multiple: a row's bits must not depend on its neighbours."""
    experts: ExpertFormat = ExpertFormat.PACKED
    train_base: bool = False
    """Every weight trains (one process, dense experts)."""
    recompute: bool = False
    """Keep only each layer's input in the forward and compute the layer again in the backward."""

    def lora_for(self, target: str) -> LoraSpec | None:
        """The adapter of modules of this kind, if they have one."""
        return self.lora if self.lora is not None and target in self.lora.targets else None
