"""Which checkpoint is trained, and where its bytes come from."""

from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section

DSA_FIELDS = ("index_n_heads", "index_head_dim", "index_topk", "dsa_layers")
"""Names inside the checkpoint's `dsa_config`: heads, head width, keys a query attends, layers from 1. No public source
shows those of the released K3.1 file: change them here when it differs."""


class ModelSource(StrEnum):
    """Where the checkpoint directory comes from."""

    HUB = "hub"
    """Downloaded from the Hugging Face Hub at a pinned revision, checksummed."""
    LOCAL = "local"
    """Already under the model directory; verified, never downloaded."""
    TINY = "tiny"
    """Made on this machine by the tiny checkpoint's maker, cached by content."""
    RANDOM = "random"
    """Random weights at real widths, made where they are measured: for speed, nothing can be learnt from them."""


class TinyCheckpoint(Section):
    """How the tiny checkpoint is made: a small model of the same family, first trained a little on sums."""

    hidden_size: int = Field(64, ge=32, multiple_of=32)
    num_hidden_layers: int = Field(8, ge=4)
    max_operand: int = Field(29, ge=5, le=99)
    """Largest operand of `a+b=`."""
    heldout_one_in: int = Field(11, ge=2)
    """One problem in this many is held out of both pre-training and RL (by hash)."""
    careful_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of pre-training answers that think before they answer."""
    steps: int = Field(380, ge=1)
    batch_size: int = Field(64, ge=1)
    lr: float = Field(3e-3, gt=0)
    seed: int = 0
    """Everything about the tiny checkpoint follows from this seed and the fields above."""


class RandomCheckpoint(Section):
    """Sizes of a checkpoint of random weights. The defaults are the published widths with fewer layers and experts."""

    num_hidden_layers: int = Field(8, ge=4)
    """Every fourth layer and the last have full attention, the first a dense feed-forward."""
    num_experts: int = Field(112, ge=1)
    """One rank's share of the published 896 under EP8."""
    num_experts_per_token: int = Field(16, ge=1)
    hidden_size: int = Field(7168, ge=32, multiple_of=32)
    intermediate_size: int = Field(33792, ge=32)
    vocab_size: int = Field(163840, ge=32)
    num_heads: int = Field(96, ge=1)
    """Of MLA and of KDA."""
    kda_head_dim: int = Field(128, ge=8)
    q_lora_rank: int = Field(1536, ge=8)
    kv_lora_rank: int = Field(512, ge=8)
    qk_nope_head_dim: int = Field(128, ge=8)
    qk_rope_head_dim: int = Field(64, ge=8)
    v_head_dim: int = Field(128, ge=8)
    index_n_heads: int = Field(32, ge=1)
    index_head_dim: int = Field(128, ge=8)
    index_topk: int = Field(2048, ge=1)
    routed_expert_hidden_size: int = Field(3584, ge=32, multiple_of=32)
    moe_intermediate_size: int = Field(3072, ge=32, multiple_of=32)
    attn_res_block_size: int = Field(4, ge=1)
    """The published 12 would leave 8 layers with a single snapshot."""
    seed: int = 0


class ModelRecipe(Section):
    """The base checkpoint: frozen in training, read as published."""

    name: str
    """Directory name under the model directory, e.g. `Kimi-K3.1`."""
    family: Literal["kimi_k31", "kimi_k3"]
    """`kimi_k31` has a DSA indexer on its MLA layers, `kimi_k3` has none."""
    source: ModelSource
    repo: str | None = None
    """Hub repository, e.g. `moonshotai/Kimi-K3.1` (source `hub`)."""
    revision: str | None = None
    """Commit or branch; a branch is resolved to a commit and recorded."""
    variant: Literal["full", "4layer", "tiny", "scaled"] = "full"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of everything but fp32 islands (norm statistics, router, decay, log-probs)."""
    ref_load: Literal["native", "torch_dist"] = "native"
    """Trainer's weights: the MXFP4 checkpoint itself, or a BF16 torch_dist made from it (Kimi-K3)."""
    trust_remote_code: bool = False
    """Let the tokenizer's own Python files run. Needs a full commit as `revision`."""
    tiny: TinyCheckpoint | None = None
    random: RandomCheckpoint | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source is ModelSource.HUB and not self.repo:
            raise ValueError("model.repo is missing: source 'hub' needs a repository, e.g. moonshotai/Kimi-K3.1")
        if (self.source is ModelSource.TINY) != (self.tiny is not None):
            raise ValueError(f"model.tiny must be given exactly when model.source is 'tiny' (source is {self.source})")
        if (self.source is ModelSource.RANDOM) != (self.random is not None):
            raise ValueError(
                f"model.random must be given exactly when model.source is 'random' (source is {self.source})"
            )
        pinned = self.revision is not None and len(self.revision) == 40
        if self.trust_remote_code and not pinned:
            raise ValueError(
                f"model.trust_remote_code needs model.revision to be a full 40-digit commit, got {self.revision!r}"
            )
        if self.family == "kimi_k31" and self.ref_load == "torch_dist":
            raise ValueError("model.ref_load 'torch_dist' is the Kimi-K3 path; Kimi-K3.1 loads its native checkpoint")
        return self


def bf16_dir(model_dir: Path) -> Path:
    """Where the BF16 conversion of a checkpoint lies: beside it."""
    return model_dir.with_name(f"{model_dir.name}-bf16")


def torch_dist_dir(model_dir: Path) -> Path:
    """Where the torch_dist conversion of a checkpoint lies (`model.ref_load: torch_dist`): beside it."""
    return model_dir.with_name(f"{model_dir.name}-torch-dist")
