"""Multi-head latent attention with the sigmoid output gate, and the DSA indexer of K3.1.

Legend: T queries of this rank's chunk, S keys (all CP chunks), D hidden, H heads of this TP rank, dq = nope + extra
query width, dv value width, L latent width, R extra key width (shared by the heads, never rotated), Hi/di index heads
and width. The pieces are shared by training, prefill and decoding: a decoder caches `latent(x)` and `Indexer.key(x)`
and never the expanded keys.
"""

import torch
from torch import Tensor, nn

from k31core.model.build import Build
from k31core.model.config import DsaConfig, ModelConfig
from k31core.model.linears import Linear, Split, padded_linear
from k31core.model.norm import LayerNorm, RmsNorm
from k31core.ops.dsa import absorb_query, expand_value, select_keys, sparse_latent_attention, sparse_mla_attention
from k31core.ops.rowstable import accumulate_dtype, sigmoid
from k31core.parallel.collectives import gather_sequence, heads_to_sequence, sequence_to_heads

_REPLAY_ROWS = 1024
"""Queries whose replayed bits are spread out at a time."""


class Indexer(nn.Module):
    """Chooses the keys each query attends; frozen, and replicated over TP so that every rank chooses the same."""

    def __init__(self, config: ModelConfig, dsa: DsaConfig, build: Build) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.topk = dsa.n_heads, dsa.head_dim, dsa.topk
        self.wq_b = Linear(config.q_lora_rank, dsa.n_heads * dsa.head_dim, build)
        self.wk = Linear(config.hidden_size, dsa.head_dim, build)
        self.k_norm = LayerNorm(dsa.head_dim, config.rms_norm_eps, dtype=build.dtype, device=build.device)
        self.weights_proj = Linear(config.hidden_size, dsa.n_heads, build)

    @torch.no_grad()
    def query(self, q_latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(index queries `[T, Hi, di]`, head weights `[T, Hi]`) from the normed query latent and the layer input."""
        return self.wq_b(q_latent).unflatten(-1, (self.n_heads, self.head_dim)), self.weights_proj(x)

    @torch.no_grad()
    def key(self, x: Tensor) -> Tensor:
        """Index keys `[T, di]`; what a decoder caches."""
        return self.k_norm(self.wk(x))


class MlaAttention(nn.Module):
    """One MLA layer's attention."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        _, local = build.mesh.tp.slice_of(heads, "MLA heads")
        build.mesh.cp.slice_of(local, "MLA heads of a TP rank (dense attention exchanges heads for sequence)")
        self.mesh, self.heads_local = build.mesh, local
        self.nope, self.extra, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent_width = config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        norm = {"dtype": build.dtype, "device": build.device}
        column = {"split": Split.COLUMN, "what": "MLA heads"}
        self.q_a_proj = Linear(hidden, config.q_lora_rank, build, lora=build.lora_for("q_a_proj"))
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.rms_norm_eps, **norm)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim, build, **column)
        self.kv_a_proj_with_mqa = Linear(
            hidden, config.kv_lora_rank + config.qk_rope_head_dim, build, lora=build.lora_for("kv_a_proj_with_mqa")
        )
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.rms_norm_eps, **norm)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (self.nope + self.value), build, **column)
        self.g_proj = Linear(hidden, heads * self.value, build, **column)
        self.o_proj = Linear(heads * self.value, hidden, build, split=Split.ROW, lora=build.lora_for("o_proj"))
        self.indexer = Indexer(config, config.dsa, build) if config.dsa is not None else None

    def query_latent(self, x: Tensor) -> Tensor:
        """q_a_layernorm(q_a x): `[T, q_lora]`, read by the queries and by the indexer."""
        return self.q_a_layernorm(self.q_a_proj(x))

    def queries(self, q_latent: Tensor) -> Tensor:
        """`[T, q_lora]` -> `[T, H, dq]`: nope part first, then the part that meets the shared key."""
        return self.q_b_proj(q_latent).unflatten(-1, (self.heads_local, self.nope + self.extra))

    def latent(self, x: Tensor) -> Tensor:
        """`[T, L + R]`: the normed key-value latent, then the shared key part. What a decoder caches."""
        latent, extra = self.kv_a_proj_with_mqa(x).split([self.latent_width, self.extra], dim=-1)
        return torch.cat([self.kv_a_layernorm(latent), extra], dim=-1)

    def keys_values(self, latent: Tensor, first: int = 0, heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Cached rows `[S, L + R]` -> keys `[S, H, dq]`, values `[S, H, dv]`; of `heads` local heads from `first`
        on."""
        heads = self.heads_local if heads is None else heads
        normed, extra = latent.split([self.latent_width, self.extra], dim=-1)
        each = self.nope + self.value
        weight = self.kv_b_proj.weight[first * each : (first + heads) * each]
        expanded = padded_linear(normed, weight, self.kv_b_proj.row_multiple).unflatten(-1, (heads, each))
        nope, value = expanded.split([self.nope, self.value], -1)
        return torch.cat([nope, extra[:, None].expand(-1, heads, -1)], dim=-1), value

    def kv_b_halves(self) -> tuple[Tensor, Tensor]:
        """kv_b as (key half `[H, nope, L]`, value half `[H, dv, L]`), for decoding on the latent itself."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.heads_local, self.nope + self.value))
        return weight[:, : self.nope], weight[:, self.nope :]

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        """o_proj(attended * sigmoid(g x)): `[T, H, dv]`, layer input `[T, D]` -> this rank's part of `[T, D]`."""
        gate = self.g_proj(x)
        opened = sigmoid(gate.to(accumulate_dtype(gate))).to(attended.dtype)
        return self.o_proj(attended.flatten(-2) * opened)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor, replay: Tensor | None = None, longest: int | None = None
    ) -> Tensor:
        """`[T, D]` inside a tensor-parallel region -> partial `[T, D]`. cu_seqlens int `[n + 1]` over all CP chunks.

        replay: uint8 `[T, W]` keys to attend: bit j of a row, lowest first, is position j of the own sequence; a row of
        zeros selects live. longest: tokens of the longest sequence; while the indexer would take them all it is not
        asked, and neither is the replay, which could name nothing else.
        """
        q_latent = self.query_latent(x)
        latent = gather_sequence(self.latent(x), self.mesh.cp)
        everything = self.indexer is None or (longest is not None and longest <= self.indexer.topk)
        if everything:
            attended = self._attend_all(self.queries(q_latent), latent, cu_seqlens)
        else:
            attended = self._attend_selected(q_latent, x, latent, cu_seqlens, replay)
        return self.finish(attended, x)

    def _attend_all(self, q: Tensor, latent: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Every causal key. Under CP heads are exchanged for sequence, so that each rank attends whole sequences."""
        cp = self.mesh.cp
        first, heads = cp.slice_of(self.heads_local, "MLA heads of a TP rank")
        keys, values = self.keys_values(latent, first, heads)
        q = heads_to_sequence(q, cp)
        return sequence_to_heads(
            sparse_mla_attention(q, keys, values, None, cu_seqlens=cu_seqlens, scale=self.scale), cp
        )

    def _attend_selected(
        self, q_latent: Tensor, x: Tensor, latent: Tensor, cu_seqlens: Tensor, replay: Tensor | None
    ) -> Tensor:
        """The keys the indexer selects. Under CP queries stay where they are and see the gathered keys."""
        cp = self.mesh.cp
        rows = None
        if cp.size > 1:
            rows = torch.arange(cp.rank * x.shape[0], (cp.rank + 1) * x.shape[0], device=x.device)
        indices = self.select(q_latent.detach(), x.detach(), cu_seqlens, rows)
        if replay is not None:
            indices = _replayed(replay, indices, cu_seqlens, rows)
        q = self.queries(q_latent)
        if x.device.type == "cuda":
            return self.over_latent(q, latent, indices)
        keys, values = self.keys_values(latent)
        return sparse_mla_attention(q, keys, values, indices, cu_seqlens=cu_seqlens, scale=self.scale, rows=rows)

    def over_latent(self, q: Tensor, latent: Tensor, indices: Tensor) -> Tensor:
        """Attention on the latent rows themselves, `[T, H, dv]`: expanded keys would need a mask of T x T.

        q `[T, H, dq]`, latent `[S, L + R]`, indices int `[T, topk]` rows of it.
        """
        key_half, value_half = self.kv_b_halves()
        absorbed = absorb_query(q, key_half)
        attended = sparse_latent_attention(absorbed, latent, indices, scale=self.scale, value_width=self.latent_width)
        return expand_value(attended, value_half)

    @torch.no_grad()
    def select(self, q_latent: Tensor, x: Tensor, cu_seqlens: Tensor, rows: Tensor | None) -> Tensor:
        """Rows of the packed keys each query attends, int32 `[T, topk]`."""
        assert self.indexer is not None
        index_q, index_w = self.indexer.query(q_latent, x)
        index_k = gather_sequence(self.indexer.key(x), self.mesh.cp)
        return select_keys(index_q, index_k, index_w, cu_seqlens=cu_seqlens, topk=self.indexer.topk, rows=rows)


def _replayed(replay: Tensor, live: Tensor, cu_seqlens: Tensor, rows: Tensor | None) -> Tensor:
    """Rows of the packed keys named by the bits `replay` `[T, W]`, as `live` `[T, topk]` names them: rising, then -1;
    the live row where a row has no bit. A row has at most topk bits."""
    if rows is None:
        rows = torch.arange(live.shape[0], device=live.device)
    bounds = cu_seqlens.to(torch.int64)
    start = bounds[torch.searchsorted(bounds, rows, right=True) - 1, None]
    places = torch.arange(8, device=replay.device, dtype=torch.uint8)
    named = torch.full_like(live, -1)
    for first in range(0, replay.shape[0], _REPLAY_ROWS):
        at = slice(first, first + _REPLAY_ROWS)
        chosen = (replay[at, :, None] >> places & 1).flatten(1).bool()
        token, position = chosen.nonzero(as_tuple=True)
        slot = chosen.cumsum(1)[token, position] - 1
        named[at].index_put_((token, slot), (position + start[at][token, 0]).to(live.dtype))
    return torch.where((replay != 0).any(-1, keepdim=True), named, live)
