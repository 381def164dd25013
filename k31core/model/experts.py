"""The routed experts a rank holds: packed MXFP4 bytes (or dense weights in pre-training), and their LoRA factors."""

import torch
from torch import Tensor, nn

from k31core.model.build import Build, ExpertFormat, LoraSpec
from k31core.model.config import ModelConfig
from k31core.model.linears import Factor
from k31core.ops.experts import DenseExperts, ExpertLora, Experts, PackedExperts, expert_mlp
from k31core.ops.mxfp4 import BLOCK
from k31core.parallel.sharding import GradSum, Shard, Stored

PROJECTIONS = ("w1", "w3", "w2")
"""Gate, up, down, as the checkpoint names them."""


class RoutedExperts(nn.Module):
    """Experts `first .. first + local - 1`; the modules `w1`, `w3`, `w2` carry the factors under their adapter names.

    Shared outer factors: w1 and w3 share A `[1, r, L]` over all experts, w2 shares B `[1, L, r]`.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        total, ffn, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.first, self.local = build.mesh.ep.slice_of(total, "routed experts")
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.row_multiple = build.row_multiple
        shapes = {"w1": (ffn, latent), "w3": (ffn, latent), "w2": (latent, ffn)}
        self.format = build.experts
        for name in PROJECTIONS:
            out, width = shapes[name]
            if build.experts is ExpertFormat.DENSE:
                weight = torch.empty(self.local, out, width, dtype=build.dtype, device=build.device)
                setattr(self, f"{name}_dense", nn.Parameter(weight, requires_grad=build.train_base))
                continue
            byte = {"dtype": torch.uint8, "device": build.device}
            self.register_buffer(f"{name}_packed", torch.zeros(self.local, out, width // 2, **byte))
            self.register_buffer(f"{name}_scale", torch.zeros(self.local, out, width // BLOCK, **byte))
        lora = build.lora_for("experts")
        self.scaling = lora.scaling if lora else 0.0
        self.adapted = lora is not None
        if lora is not None:
            for name in PROJECTIONS:
                out, width = shapes[name]
                self.add_module(name, ExpertFactors(total, (self.first, self.local), (out, width), name, build, lora))

    def weights(self) -> Experts:
        """The frozen (or dense) weights as the operator takes them."""
        if self.format is ExpertFormat.DENSE:
            return DenseExperts(*(getattr(self, f"{name}_dense") for name in PROJECTIONS))
        return PackedExperts(*(getattr(self, f"{name}_{part}") for name in PROJECTIONS for part in ("packed", "scale")))

    def lora(self) -> ExpertLora | None:
        """The factors as the operator takes them."""
        if not self.adapted:
            return None
        factors = (self.get_submodule(f"{name}.{part}").weight for name in PROJECTIONS for part in ("lora_A", "lora_B"))
        return ExpertLora(*factors, scaling=self.scaling)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows `[N, L]` sorted by local expert, counts int64 `[E_l]` -> `[N, L]`."""
        return expert_mlp(
            rows,
            counts,
            self.weights(),
            lora=self.lora(),
            beta=self.beta,
            linear_beta=self.linear_beta,
            row_multiple=self.row_multiple,
        )


class ExpertFactors(nn.Module):
    """lora_A and lora_B of one projection of the local experts."""

    def __init__(
        self,
        total: int,
        held: tuple[int, int],
        shape: tuple[int, int],
        name: str,
        build: Build,
        lora: LoraSpec,
    ) -> None:
        super().__init__()
        out, width = shape
        start, local = held

        def factor(rows: int, columns: int, shared: bool) -> Factor:
            if shared:
                return Factor(Shard((1, rows, columns), Stored.FACTOR, grad_sum=GradSum.STAGE), build, lora)
            full = (total, rows, columns)
            return Factor(Shard(full, Stored.FACTOR, 0, start, local, grad_sum=GradSum.EXPERT), build, lora)

        self.lora_A = factor(lora.rank, width, shared=name != "w2")
        self.lora_B = factor(out, lora.rank, shared=name == "w2")
