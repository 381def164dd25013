"""The latent mixture of experts with its shared expert.

Legend: T tokens, D hidden, L latent, E experts, k experts a token. `route` and `routed` are separate so that routing
can be replayed (R3) and captured.
"""

import torch
from torch import Tensor, nn

from k31core.model.build import Build
from k31core.model.config import ModelConfig
from k31core.model.dispatch import combine, dispatch
from k31core.model.experts import RoutedExperts
from k31core.model.linears import Linear, padded_linear
from k31core.model.mlp import Mlp
from k31core.model.norm import RmsNorm
from k31core.ops.rowstable import sigmoid
from k31core.parallel.collectives import all_tokens, enter_tp, leave_tp, own_tokens, slice_tokens
from k31core.parallel.sharding import Shard, Stored


class Router(nn.Module):
    """Sigmoid scores in fp32; the choice is by score plus bias, the weight is the renormalised score without bias."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.topk, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.row_multiple = build.row_multiple
        shape = (config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=build.device)
        self.register_buffer("e_score_correction_bias", bias)
        self.shards = {
            "weight": Shard(shape, Stored.SMALL),
            "e_score_correction_bias": Shard((config.num_experts,), Stored.EXACT),
        }

    def forward(self, x: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(indices int64 `[T, k]`, weights fp32 `[T, k]`) of x `[T, D]`.

        With `replay` `[T, k]` the choice is given and only the weights are computed, from the live scores, so the
        router path keeps its gradient; a row of -1 (padding, a last sampled token) is routed live. Equal biased
        scores: the smaller expert number wins, on every rank.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scores = sigmoid(padded_linear(wide, self.weight, self.row_multiple))
        biased = scores.detach() + self.e_score_correction_bias
        indices = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : self.topk]
        if replay is not None:
            indices = torch.where(replay >= 0, replay.to(torch.int64), indices)
        chosen = scores.gather(1, indices)
        return indices, chosen / chosen.sum(-1, keepdim=True) * self.scaling


class Moe(nn.Module):
    """`block_sparse_moe`: routed experts in the latent space, plus the shared expert at full width."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.mesh, self.num_experts = build.mesh, config.num_experts
        self.gate = Router(config, build)
        self.routed_expert_down_proj = Linear(hidden, latent, build)
        self.routed_expert_norm = RmsNorm(latent, config.rms_norm_eps, dtype=build.dtype, device=build.device)
        self.routed_expert_up_proj = Linear(latent, hidden, build)
        self.experts = RoutedExperts(config, build)
        self.shared_experts = Mlp(config, config.shared_intermediate_size, build, build.lora_for("shared_experts"))

    def route(self, x: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(indices int64 `[T, k]`, weights fp32 `[T, k]`); see `Router`."""
        return self.gate(x, replay)

    def routed(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The routed part for tokens x `[T, D]`, without the shared expert: `[T, D]`."""
        sent = dispatch(self.routed_expert_down_proj(x), indices, self.num_experts, self.mesh.ep)
        mixed = combine(self.experts(sent.rows, sent.counts), sent, weights, self.mesh.ep)
        return self.routed_expert_up_proj(self.routed_expert_norm(mixed))

    def forward(self, x: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(output, indices chosen) for x outside a tensor-parallel region: `[T, D]`, or `[T/tp, D]` (sequence
        parallel).

        replay: int `[T, k]` for all T tokens of the CP rank. The indices come back for this rank's own tokens.
        """
        own = own_tokens(x, self.mesh)
        indices, weights = self.route(own, None if replay is None else slice_tokens(replay, self.mesh))
        routed = all_tokens(self.routed(own, indices, weights), self.mesh)
        return routed + leave_tp(self.shared_experts(enter_tp(x, self.mesh)), self.mesh), indices
