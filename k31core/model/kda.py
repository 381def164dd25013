"""Kimi delta attention: projections, short convolutions, gated delta rule, output gate.

Legend: T tokens of this rank's sequence chunk, D hidden, H heads of this TP rank, d head width. The pieces (`project`,
`heads`, `finish`) are shared by training, prefill and decoding; only the operator between them differs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from k31core.model.build import Build
from k31core.model.config import ModelConfig
from k31core.model.linears import Linear, Split
from k31core.model.norm import RmsNorm
from k31core.ops.kda import kda_chunk, kda_gate, l2norm
from k31core.ops.rowstable import accumulate_dtype, sigmoid
from k31core.ops.short_conv import causal_conv
from k31core.parallel.collectives import heads_to_sequence, sequence_to_heads
from k31core.parallel.sharding import Shard, Stored


class KdaProjected(NamedTuple):
    """Everything KDA reads from its input, before the convolution."""

    q: Tensor
    """`[T, H * d]`, as are k and v."""
    k: Tensor
    v: Tensor
    decay: Tensor
    """`[T, H * d]`: f_b(f_a x), not yet biased."""
    beta: Tensor
    """`[T, H]` logits."""
    gate: Tensor
    """`[T, H * d]` logits of the output gate."""


class KdaHeads(NamedTuple):
    """The arguments of the KDA operators, per head."""

    q: Tensor
    """`[T, H, d]`, L2-normalised (the operator scales it), as is k."""
    k: Tensor
    v: Tensor
    g: Tensor
    """`[T, H, d]` fp32 log decay."""
    beta: Tensor
    """`[T, H]` in (0, 1)."""


class KdaAttention(nn.Module):
    """One KDA layer's attention."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, heads, width = config.hidden_size, config.kda_num_heads, config.kda_head_dim
        start, local = build.mesh.tp.slice_of(heads, "KDA heads")
        self.mesh, self.heads_local, self.width = build.mesh, local, width
        build.mesh.cp.slice_of(local, "KDA heads of a TP rank (context parallelism exchanges heads for sequence)")
        self.lower_bound = config.gate_lower_bound
        column = {"split": Split.COLUMN, "what": "KDA heads"}
        self.q_proj = Linear(hidden, heads * width, build, **column)
        self.k_proj = Linear(hidden, heads * width, build, **column)
        self.v_proj = Linear(hidden, heads * width, build, **column)
        self.f_a_proj = Linear(hidden, width, build)
        self.f_b_proj = Linear(width, heads * width, build, **column)
        self.b_proj = Linear(hidden, heads, build, **column)
        self.g_proj = Linear(hidden, heads * width, build, **column)
        self.q_conv1d = ConvFilter(heads * width, config.short_conv_kernel_size, build)
        self.k_conv1d = ConvFilter(heads * width, config.short_conv_kernel_size, build)
        self.v_conv1d = ConvFilter(heads * width, config.short_conv_kernel_size, build)
        fp32 = {"dtype": torch.float32, "device": build.device}
        self.A_log = nn.Parameter(torch.zeros(local, **fp32), requires_grad=build.train_base)
        self.dt_bias = nn.Parameter(torch.zeros(local * width, **fp32), requires_grad=build.train_base)
        self.shards = {
            "A_log": Shard((heads,), Stored.EXACT, 0, start, local, zero_padded_to=config.padded_a_log),
            "dt_bias": Shard((heads * width,), Stored.EXACT, 0, start * width, local * width),
        }
        self.o_norm = RmsNorm(width, config.rms_norm_eps, dtype=build.dtype, device=build.device)
        self.o_proj = Linear(heads * width, hidden, build, split=Split.ROW, lora=build.lora_for("o_proj"))

    def project(self, x: Tensor) -> KdaProjected:
        """All projections of `[T, D]`."""
        return KdaProjected(
            q=self.q_proj(x),
            k=self.k_proj(x),
            v=self.v_proj(x),
            decay=self.f_b_proj(self.f_a_proj(x)),
            beta=self.b_proj(x),
            gate=self.g_proj(x),
        )

    def conv_filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution weights of q, k, v, each `[H * d, 1, kernel]`."""
        return self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight

    def heads(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> KdaHeads:
        """Operator arguments from convolved q, k, v `[T, H * d]`, decay `[T, H * d]` and beta `[T, H]` logits."""
        return self._heads(q, k, v, decay, beta, self.A_log, self.dt_bias)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """o_proj(RMSNorm_head(o) * sigmoid(gate)): `[T, H, d]`, `[T, H * d]` -> this rank's part of `[T, D]`."""
        normed = self.o_norm(o).flatten(-2)
        return self.o_proj(normed * sigmoid(gate.to(accumulate_dtype(gate))).to(normed.dtype))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`[T, D]` inside a tensor-parallel region -> partial `[T, D]`. cu_seqlens int `[n + 1]` over all CP chunks."""
        projected = self.project(x)
        if self.mesh.cp.size > 1:
            return self.finish(self._mix_exchanged(projected, cu_seqlens), projected.gate)
        q, k, v = (
            causal_conv(part, weight, cu_seqlens)
            for part, weight in zip(projected[:3], self.conv_filters(), strict=True)
        )
        o, _ = kda_chunk(*self.heads(q, k, v, projected.decay, projected.beta), cu_seqlens)
        return self.finish(o, projected.gate)

    def _mix_exchanged(self, projected: KdaProjected, cu_seqlens: Tensor) -> Tensor:
        """Convolution and delta rule on all tokens for this CP rank's share of the heads; `[T, H, d]` of the own
        tokens."""
        cp, width = self.mesh.cp, self.width
        start, own = cp.slice_of(self.heads_local, "KDA heads of a TP rank")
        by_head = [part.unflatten(-1, (self.heads_local, -1)) for part in projected[:5]]
        sent = torch.cat(by_head, dim=-1)
        q, k, v, decay, beta = heads_to_sequence(sent, cp).split([width, width, width, width, 1], dim=-1)
        channels = slice(start * width, (start + own) * width)
        q, k, v = (
            causal_conv(part.flatten(1), weight[channels], cu_seqlens)
            for part, weight in zip((q, k, v), self.conv_filters(), strict=True)
        )
        heads = self._heads(
            q, k, v, decay.flatten(1), beta.squeeze(-1), self.A_log[start : start + own], self.dt_bias[channels]
        )
        o, _ = kda_chunk(*heads, cu_seqlens)
        return sequence_to_heads(o, cp)

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> KdaHeads:
        q, k, v, decay = (part.unflatten(-1, (a_log.shape[0], self.width)) for part in (q, k, v, decay))
        g = kda_gate(decay, a_log, dt_bias, self.lower_bound)
        return KdaHeads(l2norm(q), l2norm(k), v, g, sigmoid(beta.to(accumulate_dtype(beta))))


class ConvFilter(nn.Module):
    """The weight of a depthwise convolution `[channels, 1, kernel]`, fp32; channels divided over TP like the heads."""

    def __init__(self, channels: int, kernel: int, build: Build) -> None:
        super().__init__()
        start, length = build.mesh.tp.slice_of(channels, "KDA channels")
        self.weight = nn.Parameter(
            torch.zeros(length, 1, kernel, dtype=torch.float32, device=build.device), requires_grad=build.train_base
        )
        self.shards = {"weight": Shard((channels, 1, kernel), Stored.SMALL, 0, start, length)}
