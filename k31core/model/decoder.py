"""The text decoder of Kimi-K3 and K3.1: embedding, layers, final mix and norm, head; any part of it for one rank.

Module names are the checkpoint's without the prefix `language_model.`; layers keep their absolute numbers on every
stage.

Legend: T tokens of this CP rank (a multiple of TP), D hidden, L layers, k experts a token, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from k31core.model.build import Build
from k31core.model.config import ModelConfig
from k31core.model.kda import KdaAttention
from k31core.model.linears import Linear, Split
from k31core.model.mla import MlaAttention
from k31core.model.mlp import Mlp
from k31core.model.moe import Moe
from k31core.model.norm import RmsNorm
from k31core.model.residual import Residual, ResidualProj, mix
from k31core.parallel.collectives import enter_tp, leave_tp
from k31core.parallel.mesh import stage_layers
from k31core.parallel.sharding import Shard, Stored


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed microbatch, as one CP rank gets it."""

    tokens: Tensor
    """int64 `[T]`: this rank's chunk."""
    cu_seqlens: Tensor
    """int64 `[n + 1]`: bounds of the sequences over all CP chunks, from 0 to cp * T. Padding is a sequence of its
    own."""
    routing: Tensor | None = None
    """int `[T, L, k]`: experts to replay, by absolute layer (R3); a row of -1, or None, routes live."""
    selection: Tensor | None = None
    """uint8 `[T, M, W]`: keys to attend in the M MLA layers (indexer replay): bit j of a row, lowest first, is position
    j of the own sequence. A row of zeros, or None, selects live."""


class DecoderLayer(nn.Module):
    """One layer: AttnRes mix, attention, AttnRes mix, feed-forward."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        hidden = config.hidden_size
        norm = {"dtype": build.dtype, "device": build.device}
        self.mesh = build.mesh
        self.takes_snapshot = index % config.attn_res_block_size == 0
        self.input_layernorm = RmsNorm(hidden, config.rms_norm_eps, **norm)
        self.post_attention_layernorm = RmsNorm(hidden, config.rms_norm_eps, **norm)
        self.self_attention_res_norm = RmsNorm(hidden, config.rms_norm_eps, **norm)
        self.self_attention_res_proj = ResidualProj(hidden, build)
        self.mlp_res_norm = RmsNorm(hidden, config.rms_norm_eps, **norm)
        self.mlp_res_proj = ResidualProj(hidden, build)
        self.self_attn: nn.Module = MlaAttention(config, build) if config.is_mla(index) else KdaAttention(config, build)
        self.block_sparse_moe: Moe | None = None
        self.mlp: Mlp | None = None
        if config.is_moe(index):
            self.block_sparse_moe = Moe(config, build)
        else:
            self.mlp = Mlp(config, config.intermediate_size, build, build.lora_for("mlp"))

    def attention_input(self, residual: Residual) -> Tensor:
        """What the attention reads: `[T, D]`."""
        return self.input_layernorm(mix(residual, self.self_attention_res_norm, self.self_attention_res_proj))

    def after_attention(self, residual: Residual, attended: Tensor) -> Residual:
        """The residual once the attention's output `[T, D]` is in it; the first layer of a block takes a snapshot."""
        if self.takes_snapshot:
            return Residual(residual.snapshot().bank, attended)
        return Residual(residual.bank, residual.prefix + attended)

    def ffn_input(self, residual: Residual) -> Tensor:
        """What the feed-forward reads: `[T, D]`."""
        return self.post_attention_layernorm(mix(residual, self.mlp_res_norm, self.mlp_res_proj))

    def ffn(self, y: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(output `[T, D]`, experts chosen `[T, k]` or None for a dense layer)."""
        if self.block_sparse_moe is not None:
            return self.block_sparse_moe(y, replay)
        assert self.mlp is not None
        return leave_tp(self.mlp(enter_tp(y, self.mesh)), self.mesh), None

    def forward(
        self,
        bank: Tensor,
        prefix: Tensor,
        cu_seqlens: Tensor,
        experts: Tensor | None = None,
        keys: Tensor | None = None,
        longest: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(bank, prefix, experts chosen) after the layer; plain tensors, so that it can be recomputed.

        experts int `[T, k]`, keys uint8 `[T, W]`: what to replay. longest: tokens of the longest sequence, if known.
        """
        residual = Residual(bank, prefix)
        x = enter_tp(self.attention_input(residual), self.mesh)
        if isinstance(self.self_attn, MlaAttention):
            attended = self.self_attn(x, cu_seqlens, keys, longest)
        else:
            attended = self.self_attn(x, cu_seqlens)
        residual = self.after_attention(residual, leave_tp(attended, self.mesh))
        out, chosen = self.ffn(self.ffn_input(residual), experts)
        return residual.bank, residual.prefix + out, chosen


class DecoderBody(nn.Module):
    """`model.*`: the parts of one pipeline stage."""

    def __init__(self, config: ModelConfig, layers: range, build: Build) -> None:
        super().__init__()
        norm = {"dtype": build.dtype, "device": build.device}
        if build.mesh.first_stage:
            self.embed_tokens = Embedding(config, build)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, index, build) for index in layers})
        if build.mesh.last_stage:
            self.output_attn_res_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, **norm)
            self.output_attn_res_proj = ResidualProj(config.hidden_size, build)
            self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, **norm)


class Decoder(nn.Module):
    """The decoder, or one rank's share of it. `lm_head.weight` `[V/tp, D]` is applied by the log-prob operator."""

    def __init__(self, config: ModelConfig, build: Build, layers: range | None = None) -> None:
        super().__init__()
        if layers is None:
            layers = stage_layers(config.num_hidden_layers, build.mesh.pp.size)[build.mesh.pp.rank]
        self.config, self.build = config, build
        self.model = DecoderBody(config, layers, build)
        if build.mesh.last_stage:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, build, split=Split.COLUMN, what="vocabulary")
        if build.train_base:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".indexer." not in name)

    @property
    def layers(self) -> dict[int, DecoderLayer]:
        """This rank's layers by absolute number."""
        return {int(index): layer for index, layer in self.model.layers.items()}  # type: ignore[misc]

    def embed(self, tokens: Tensor) -> Residual:
        """The residual before layer 0: an empty bank and the embeddings `[T, D]` (or this rank's slice)."""
        prefix = leave_tp(self.model.embed_tokens(tokens), self.build.mesh)
        if torch.is_grad_enabled() and not prefix.requires_grad and any(p.requires_grad for p in self.parameters()):
            # A recomputed layer whose input needs no gradient yields none for its adapters, silently.
            prefix = prefix.requires_grad_(True)
        return Residual(prefix.new_empty(0, *prefix.shape), prefix)

    def run_layers(self, residual: Residual, batch: Packed) -> tuple[Residual, dict[int, Tensor]]:
        """(residual after this rank's layers, experts chosen `[T, k]` by absolute layer number).

        Forward and recomputation of a layer are given the same slices of what is replayed, so neither keeps a cursor.
        """
        chosen: dict[int, Tensor] = {}
        bank, prefix = residual
        longest = int(batch.cu_seqlens.diff().max())
        for index, layer in self.layers.items():
            inputs = (bank, prefix, batch.cu_seqlens, *self._replayed(batch, index, layer), longest)
            if self.build.recompute and torch.is_grad_enabled():
                bank, prefix, used = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                bank, prefix, used = layer(*inputs)
            if used is not None:
                chosen[index] = used
        return Residual(bank, prefix), chosen

    def _replayed(self, batch: Packed, index: int, layer: DecoderLayer) -> tuple[Tensor | None, Tensor | None]:
        experts = keys = None
        if batch.routing is not None and layer.block_sparse_moe is not None:
            experts = batch.routing[:, index]
        if batch.selection is not None and self.config.is_mla(index):
            keys = batch.selection[:, self.config.mla_layers.index(index)]
        return experts, keys

    def final_hidden(self, residual: Residual) -> Tensor:
        """Last mix and norm, `[T, D]`: what the head reads."""
        body = self.model
        return body.norm(mix(residual, body.output_attn_res_norm, body.output_attn_res_proj))

    def forward(self, batch: Packed, received: Tensor | None = None) -> Tensor:
        """One stage on one microbatch: `[T, D]` for the head on the last stage, else the packed residual for the next
        one.

        received: the previous stage's packed residual; None on the first stage.
        """
        residual = self.embed(batch.tokens) if received is None else Residual.unpack(received)
        residual, _ = self.run_layers(residual, batch)
        if not self.build.mesh.last_stage:
            return residual.pack()
        return enter_tp(self.final_hidden(residual), self.build.mesh)

    def forward_captured(self, batch: Packed) -> tuple[Tensor, Tensor]:
        """(hidden `[T, D]`, experts chosen int64 `[T, L, k]`, 0 in dense layers): one process, nothing kept for
        gradients."""
        residual, chosen = self.run_layers(self.embed(batch.tokens), batch)
        config = self.config
        routing = torch.zeros(
            len(batch.tokens), config.num_hidden_layers, config.num_experts_per_token, dtype=torch.int64
        ).to(batch.tokens.device)
        for index, experts in chosen.items():
            routing[:, index] = experts
        return self.final_hidden(residual), routing

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits `[T, V/tp]`, fp32 (fp64 for a float64 model)."""
        return self.lm_head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))


class Embedding(nn.Module):
    """Rows of the vocabulary divided over TP; a rank looks up its own tokens and leaves zeros for the others."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.start, self.length = build.mesh.tp.slice_of(config.vocab_size, "vocabulary")
        self.divided = self.length != config.vocab_size
        self.weight = nn.Parameter(
            torch.empty(self.length, config.hidden_size, dtype=build.dtype, device=build.device),
            requires_grad=build.train_base,
        )
        self.shards = {"weight": Shard(shape, Stored.WEIGHT, 0, self.start, self.length)}

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `[T]` -> this rank's part of the sum `[T, D]`."""
        if not self.divided:
            return nn.functional.embedding(tokens, self.weight)
        local = tokens - self.start
        inside = (local >= 0) & (local < self.length)
        rows = nn.functional.embedding(torch.where(inside, local, 0), self.weight)
        return rows * inside[:, None]
