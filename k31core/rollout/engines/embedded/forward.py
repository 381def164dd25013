"""The decoder run over caches: one token for every running row, or a piece of a prompt. Pieces of layers are the
model's own.

Legend: B rows padded to the row multiple, T packed prompt tokens, D hidden, V vocabulary, L layers, k experts a
token, b blocks of BLOCK cache slots, W cached latent width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from k31core.model.decoder import Decoder, DecoderLayer
from k31core.model.kda import KdaAttention
from k31core.model.mla import MlaAttention
from k31core.model.residual import Residual
from k31core.ops.kda import kda_chunk
from k31core.ops.short_conv import causal_conv, causal_conv_state, causal_conv_step
from k31core.rollout.engines.embedded.attention import BLOCK, causal_mask, latent_attention, selected_mask
from k31core.rollout.engines.embedded.cache import Caches, PromptState
from k31core.rollout.engines.embedded.experts import BatchedExperts, dense_bytes
from k31core.rollout.engines.embedded.recurrence import delta_step_

QUERY_BLOCK = 16
"""Prompt queries are padded to a multiple, aligned to their position in the prompt."""
QUERY_CHUNK = 256
"""Prompt queries whose scores exist at a time."""
DENSE_EXPERTS_BYTES = 64 << 20
"""64 MiB: a small model's experts are kept decoded and computed in one product, larger ones stay packed."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One token for each row; rows past the running ones are padding and use page 0."""

    tokens: Tensor
    """int64 `[B]`."""
    position: Tensor
    """int64 `[B]`: tokens of the row already cached, so also the position of this one."""
    pages: Tensor
    """int64 `[B, b]`: page table, at least `position // BLOCK + 1` entries in use; others are 0."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of one prompt; all but its last piece have a multiple of BLOCK tokens."""

    tokens: Tensor
    """int64 `[t]`."""
    start: int
    """Position of the first of them, a multiple of BLOCK."""
    state: PromptState
    """Advanced in place."""
    selected: list[Tensor] | None = None
    """Gets what every token attends, bool `[t, slots]` of each MLA layer in order, when it is a list."""


class CachedDecoder:
    """A decoder with weights prepared for decoding. Holds no request state."""

    def __init__(self, model: Decoder, *, dense_experts_bytes: int = DENSE_EXPERTS_BYTES) -> None:
        """`dense_experts_bytes`: keep the experts decoded when those of all layers take no more than this."""
        self.model, self.config = model, model.config
        self.row_multiple = model.build.row_multiple
        self._conv_filters = {
            index: torch.cat(layer.self_attn.conv_filters())
            for index, layer in model.layers.items()
            if isinstance(layer.self_attn, KdaAttention)
        }
        self._kda_number = {index: number for number, index in enumerate(self._conv_filters)}
        moes = {index: layer.block_sparse_moe for index, layer in model.layers.items() if layer.block_sparse_moe}
        small = sum(dense_bytes(moe.experts, model.build.dtype) for moe in moes.values()) <= dense_experts_bytes
        self._batched_experts = {index: BatchedExperts(moe) for index, moe in moes.items()} if small else {}
        self._mla_number = {index: number for number, index in enumerate(self.config.mla_layers)}
        self.index_topk = 0 if self.config.dsa is None else self.config.dsa.topk

    @property
    def batches_experts(self) -> bool:
        """All experts of a layer are computed in one product (small models)."""
        return bool(self._batched_experts)

    def decode(self, step: StepInput, caches: Caches, selected: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """(logits fp32 `[B, V]`, experts chosen int16 `[B, L, k]`); the caches gain one token a row.

        selected: gets what every row attends, bool `[B, b * BLOCK]` of each MLA layer in order, when it is a list.
        """
        rows = len(step.tokens)
        page = step.pages.gather(1, (step.position // BLOCK)[:, None]).squeeze(1)
        slot = page * BLOCK + step.position % BLOCK
        visible = causal_mask(step.position[:, None] + 1, step.pages.shape[1] * BLOCK)

        def attend(index: int, attention: KdaAttention | MlaAttention, x: Tensor) -> Tensor:
            if isinstance(attention, KdaAttention):
                number = self._kda_number[index]
                conv, state = caches.conv[number, :rows], caches.state[number, :rows]
                return self._kda_step(index, attention, x, conv, state)
            number = self._mla_number[index]
            cached = (caches.latent[number], caches.index_keys[number])
            attended, seen = _mla_step(attention, x, step, slot, visible, cached)
            if selected is not None:
                selected.append(seen[:, 0])
            return attended

        residual, routing = self._run(step.tokens, attend)
        return self.model.logits(self.model.final_hidden(residual)), routing

    def prefill(self, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        """(hidden after the final norm `[T, D]`, experts chosen int16 `[T, L, k]`) of the packed pieces."""
        lengths = [len(piece.tokens) for piece in pieces]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(pieces[0].tokens.device)

        def attend(index: int, attention: KdaAttention | MlaAttention, x: Tensor) -> Tensor:
            if isinstance(attention, KdaAttention):
                return self._kda_prefill(index, attention, x, pieces, bounds)
            return _mla_prefill(attention, x, pieces, lengths, self._mla_number[index])

        residual, routing = self._run(torch.cat([piece.tokens for piece in pieces]), attend)
        return self.model.final_hidden(residual), routing

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 `[n, V]` of hidden `[n, D]`."""
        return self.model.logits(hidden)

    def _run(self, tokens: Tensor, attend) -> tuple[Residual, Tensor]:  # type: ignore[no-untyped-def]
        config = self.config
        routing = torch.zeros(
            len(tokens), config.num_hidden_layers, config.num_experts_per_token, dtype=torch.int16, device=tokens.device
        )
        residual = self.model.embed(tokens)
        for index, layer in self.model.layers.items():
            attended = attend(index, layer.self_attn, layer.attention_input(residual))
            residual = layer.after_attention(residual, attended)
            out, chosen = self._ffn(index, layer, layer.ffn_input(residual))
            residual = Residual(residual.bank, residual.prefix + out)
            if chosen is not None:
                routing[:, index] = chosen
        return residual, routing

    def _ffn(self, index: int, layer: DecoderLayer, y: Tensor) -> tuple[Tensor, Tensor | None]:
        batched = self._batched_experts.get(index)
        if batched is None or layer.block_sparse_moe is None:
            return layer.ffn(y)
        routed, chosen = batched(y)
        return routed + layer.block_sparse_moe.shared_experts(y), chosen

    def _kda_step(self, index: int, attention: KdaAttention, x: Tensor, conv: Tensor, state: Tensor) -> Tensor:
        """`[B, D]` -> `[B, D]`; conv `[B, C, kernel - 1]` and state `[B, H, d, d]` are advanced in place."""
        projected = attention.project(x)
        mixed, new_conv = causal_conv_step(torch.cat(projected[:3], dim=-1), conv, self._conv_filters[index])
        conv.copy_(new_conv)
        q, k, v = mixed.chunk(3, dim=-1)
        heads = attention.heads(q, k, v, projected.decay, projected.beta)
        o = delta_step_(*heads, state)
        return attention.finish(o, projected.gate)

    def _kda_prefill(
        self, index: int, attention: KdaAttention, x: Tensor, pieces: list[Piece], bounds: Tensor
    ) -> Tensor:
        number = self._kda_number[index]
        projected = attention.project(x)
        joined, filters = torch.cat(projected[:3], dim=-1), self._conv_filters[index]
        before = torch.stack([piece.state.conv[number] for piece in pieces])
        mixed = causal_conv(joined, filters, bounds, before)
        after = causal_conv_state(joined, bounds, filters.shape[-1], before)
        q, k, v = mixed.chunk(3, dim=-1)
        heads = attention.heads(q, k, v, projected.decay, projected.beta)
        o, states = kda_chunk(*heads, bounds, torch.stack([piece.state.state[number] for piece in pieces]))
        for row, piece in enumerate(pieces):
            piece.state.conv[number] = after[row]
            piece.state.state[number] = states[row]
        return attention.finish(o, projected.gate)


def _mla_step(
    attention: MlaAttention,
    x: Tensor,
    step: StepInput,
    slot: Tensor,
    visible: Tensor,
    caches: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """`[B, D]` -> (`[B, D]`, slots attended like `visible`): write this token into its slot, then attend.

    visible: bool `[B, 1, b * BLOCK]`.
    """
    latent_pages, index_pages = caches
    q_latent = attention.query_latent(x)
    latent_pages.view(-1, latent_pages.shape[-1])[slot] = attention.latent(x)
    indexer = attention.indexer
    if indexer is not None:
        index_pages.view(-1, index_pages.shape[-1])[slot] = indexer.key(x)
        if visible.shape[-1] > indexer.topk:
            index_q, index_w = indexer.query(q_latent, x)
            ends = step.position[:, None] + 1
            visible = selected_mask(index_q[:, None], index_w[:, None], index_pages[step.pages], ends, indexer.topk)
    query = absorbed_query(attention, q_latent)[:, None]
    attended = latent_attention(
        query, latent_pages[step.pages], visible, latent=attention.latent_width, scale=attention.scale
    )
    return attention.finish(expanded_value(attention, attended[:, 0]), x), visible


def _mla_prefill(attention: MlaAttention, x: Tensor, pieces: list[Piece], lengths: list[int], number: int) -> Tensor:
    """`[T, D]` -> `[T, D]`: extend every prompt's latent blocks, then attend over them, prompt by prompt."""
    q_latent = attention.query_latent(x)
    parts = [absorbed_query(attention, q_latent), attention.latent(x)]
    indexer = attention.indexer
    if indexer is not None:
        parts += [indexer.key(x), *indexer.query(q_latent, x)]
    attended = []
    for piece, *own in zip(pieces, *(part.split(lengths) for part in parts)):
        latent, index_keys = piece.state.latent[number], piece.state.index_keys[number]
        end = piece.start + len(piece.tokens)
        latent.view(-1, latent.shape[-1])[piece.start : end] = own[1]
        if indexer is not None:
            index_keys.view(-1, index_keys.shape[-1])[piece.start : end] = own[2]
        seen = []
        for first in range(0, len(piece.tokens), QUERY_CHUNK):
            at = slice(first, first + QUERY_CHUNK)
            queries = (own[0][at], *(o[at] for o in own[3:]))
            part, visible = _attend_prompt(attention, piece, first, queries, (latent, index_keys))
            attended.append(part)
            seen.append(visible)
        if piece.selected is not None:
            width = seen[-1].shape[-1]
            padded = [torch.nn.functional.pad(mask, (0, width - mask.shape[-1])) for mask in seen]
            piece.selected.append(torch.cat(padded))
    return attention.finish(expanded_value(attention, torch.cat(attended)), x)


def _attend_prompt(
    attention: MlaAttention, piece: Piece, first: int, queries: tuple[Tensor, ...], cached: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(`[q, H, L]`, slots attended bool `[q, slots]`) for q queries from number `first` of the piece over the prompt's
    blocks `[b, BLOCK, W]`.

    queries: the absorbed query `[q, H, W]`, and with an indexer its queries `[q, Hi, di]` and weights `[q, Hi]`.
    """
    count = len(queries[0])
    position = piece.start + first
    blocks = -(-(position + count) // BLOCK)
    padded = [_pad_rows(part, QUERY_BLOCK)[None] for part in queries]
    ends = torch.arange(position, position + padded[0].shape[1], device=piece.tokens.device)[None] + 1
    ends = ends.clamp(max=position + count)  # padding queries see what the last real one sees
    latent, index_keys = (cache[None, :blocks] for cache in cached)
    indexer = attention.indexer
    if indexer is not None and position + count > indexer.topk:
        visible = selected_mask(padded[1], padded[2], index_keys, ends, indexer.topk)
    else:
        visible = causal_mask(ends, blocks * BLOCK)
    out = latent_attention(padded[0], latent, visible, latent=attention.latent_width, scale=attention.scale)
    return out[0, :count], visible[0, :count]


def absorbed_query(attention: MlaAttention, q_latent: Tensor) -> Tensor:
    """Queries that meet the cached latent directly: `[T, q_lora]` -> `[T, H, W]`."""
    nope, extra = attention.queries(q_latent).split([attention.nope, attention.extra], dim=-1)
    key_half, _ = attention.kv_b_halves()
    return torch.cat([_per_head(nope, key_half, attention.kv_b_proj.row_multiple), extra], dim=-1)


def expanded_value(attention: MlaAttention, attended: Tensor) -> Tensor:
    """Attended latents `[T, H, L]` -> attended values `[T, H, dv]`."""
    _, value_half = attention.kv_b_halves()
    return _per_head(attended, value_half.transpose(1, 2), attention.kv_b_proj.row_multiple)


def _per_head(x: Tensor, weight: Tensor, row_multiple: int) -> Tensor:
    """x `[T, H, a]` times weight `[H, a, c]` head by head: `[T, H, c]`, with T padded like every matrix product."""
    padded = _pad_rows(x, row_multiple).transpose(0, 1)
    return (padded @ weight.to(x.dtype)).transpose(0, 1)[: len(x)]


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Zero rows appended up to a multiple."""
    padding = -x.shape[0] % multiple
    return x if not padding else torch.cat([x, x.new_zeros(padding, *x.shape[1:])])
