"""Routed experts in plain torch: y = w2(SiTU-GLU(w1 x, w3 x)) with the LoRA bypass, one expert's rows after another's.

Packed weights stay packed: a few experts are decoded at a time (one, at real sizes), in the forward and again in the
backward, so neither pass ever holds a layer of dense experts. Each expert's rows stand in a block padded with zero rows
to a multiple of `row_multiple`: a matrix product of 1-3 rows takes another code path on CPU than one of 4 or more, and
with the padding a row's result does not depend on who else is in the batch.

Legend: N rows sorted by expert, P padded rows, L latent, F FFN width, r rank, E experts; `_e` is one expert's part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k31core.ops.experts.weights import DenseExperts, ExpertLora, Experts, PackedExperts, check_call
from k31core.ops.mxfp4.reference import decode_unchecked

_DECODE_BYTES = 4 << 20
"""Dense bytes decoded at a time when experts are small; a larger expert is decoded alone."""


def expert_mlp_reference(
    x: Tensor,
    counts: Tensor,
    weights: Experts,
    *,
    lora: ExpertLora | None,
    beta: float,
    linear_beta: float,
    row_multiple: int,
) -> Tensor:
    """`[N, L]` from x `[N, L]` (rows sorted by expert) and counts int64 `[E]`; see the package for the arguments."""
    blocks = _Blocks.of(check_call(x, counts, weights, lora), row_multiple)
    if blocks.rows == 0:
        return _empty_result(x, weights, lora)
    index = blocks.padded_index(x.device)
    x_P = x if index is None else x.new_zeros(blocks.rows, x.shape[1]).index_copy(0, index, x)
    factors = None if lora is None else tuple(f.to(x.dtype) for f in lora.factors())
    activation = _Activation(beta, linear_beta, 0.0 if lora is None else lora.scaling)
    if isinstance(weights, PackedExperts):
        y_P = _PackedExpertMlp.apply(x_P, blocks, activation, weights, *(factors or ()))
    else:
        y_P = _dense_expert_mlp(x_P, blocks, activation, weights, factors)
    return y_P if index is None else y_P.index_select(0, index)


def situ_glu(a: Tensor, b: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta), computed in at least float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    a_w, b_w = a.to(wide), b.to(wide)
    gate = beta * torch.tanh(a_w / beta) * torch.sigmoid(a_w)
    return (gate * (linear_beta * torch.tanh(b_w / linear_beta))).to(a.dtype)


def situ_glu_backward(
    dh: Tensor, a: Tensor, b: Tensor, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(h, da, db) from the gradient of h, in the dtype of `a`."""
    wide = torch.promote_types(a.dtype, torch.float32)
    a_w, b_w, dh_w = a.to(wide), b.to(wide), dh.to(wide)
    t, s, u = torch.tanh(a_w / beta), torch.sigmoid(a_w), torch.tanh(b_w / linear_beta)
    gate, linear = beta * t * s, linear_beta * u
    gate_slope = (1 - t * t) * s + gate * (1 - s)
    h, da, db = gate * linear, dh_w * linear * gate_slope, dh_w * gate * (1 - u * u)
    return h.to(a.dtype), da.to(a.dtype), db.to(a.dtype)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where each expert's rows stand once every block is padded."""

    counts: list[int]
    padded: list[int]

    @staticmethod
    def of(counts: list[int], row_multiple: int) -> "_Blocks":
        if row_multiple < 1:
            raise ValueError(f"row_multiple must be at least 1, got {row_multiple}")
        return _Blocks(counts, [-(-n // row_multiple) * row_multiple for n in counts])

    @property
    def rows(self) -> int:
        return sum(self.padded)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first padded row, one past the last) of every expert that has rows."""
        start = 0
        for expert, size in enumerate(self.padded):
            if size:
                yield expert, start, start + size
            start += size

    def padded_index(self, device: torch.device) -> Tensor | None:
        """Padded position of each row, int64 `[N]`; None when nothing needs padding."""
        if self.counts == self.padded:
            return None
        positions: list[int] = []
        start = 0
        for count, size in zip(self.counts, self.padded, strict=True):
            positions.extend(range(start, start + count))
            start += size
        return torch.tensor(positions, device=device)


@dataclass(frozen=True, slots=True)
class _Activation:
    beta: float
    linear_beta: float
    scaling: float
    """alpha / rank of the bypass; unused without one."""


def _decoded(
    weights: PackedExperts, blocks: _Blocks, dtype: torch.dtype
) -> Iterator[tuple[int, int, int, list[Tensor]]]:
    """(expert, start, end, [w1, w3, w2]) of every expert with rows, decoding a group of experts at a time."""
    size = 3 * weights.ffn * weights.latent * dtype.itemsize
    group = max(1, _DECODE_BYTES // size)
    first, dense = -1, []
    packed = weights.tensors()
    for expert, start, end in blocks.spans():
        if first < 0 or expert >= first + group:
            first = expert
            dense.clear()  # before the next group is decoded, so that two never live at once
            part = slice(first, first + group)
            dense.extend(decode_unchecked(packed[i][part], packed[i + 1][part], dtype).unbind(0) for i in (0, 2, 4))
        yield expert, start, end, [w[expert - first] for w in dense]


class _PackedExpertMlp(torch.autograd.Function):
    """Saves rows, bytes and factors; gradients go to the rows and the factors, none to the frozen weights."""

    @staticmethod
    def forward(ctx, x_P: Tensor, blocks: _Blocks, activation: _Activation, weights: PackedExperts, *factors: Tensor):
        ctx.save_for_backward(x_P, *factors)
        ctx.blocks, ctx.activation, ctx.weights = blocks, activation, weights
        y_P = torch.empty_like(x_P)
        lora = _Bypass.of(x_P, factors, activation.scaling)
        for expert, start, end, (w1, w3, w2) in _decoded(weights, blocks, x_P.dtype):
            x_e = x_P[start:end]
            a, b = x_e @ w1.t(), x_e @ w3.t()
            if lora:
                lora.add_inner(a, b, expert, start, end)
            h = situ_glu(a, b, activation.beta, activation.linear_beta)
            torch.mm(h, w2.t(), out=y_P[start:end])
            if lora:
                y_P[start:end] += (h @ lora.w2_A[expert].t() @ lora.w2_B[0].t()) * lora.scaling
        return y_P

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_P: Tensor):
        x_P, *factors = ctx.saved_tensors
        activation = ctx.activation
        dx_P = torch.empty_like(x_P)
        lora = _Bypass.of(x_P, factors, activation.scaling)
        grads = _BypassGrads.zeros(lora, x_P) if lora else None
        for expert, start, end, (w1, w3, w2) in _decoded(ctx.weights, ctx.blocks, x_P.dtype):
            x_e, dy_e = x_P[start:end], dy_P[start:end]
            a, b = x_e @ w1.t(), x_e @ w3.t()
            dh = dy_e @ w2
            if lora and grads:
                lora.add_inner(a, b, expert, start, end)
                dt = (dy_e @ lora.w2_B[0]) * lora.scaling
                dh += dt @ lora.w2_A[expert]
            h, da, db = situ_glu_backward(dh, a, b, activation.beta, activation.linear_beta)
            dx_e = torch.mm(da, w1, out=dx_P[start:end])
            dx_e += db @ w3
            if lora and grads:
                grads.add(lora, expert, (start, end), (dy_e, dt, h, da, db))
        if not (lora and grads):
            return dx_P, None, None, None
        dx_P += grads.du1 @ lora.w1_A[0]
        dx_P += grads.du3 @ lora.w3_A[0]
        return dx_P, None, None, None, *grads.factors(x_P)


@dataclass(slots=True)
class _Bypass:
    """The LoRA factors of one call and the two shared down-projections of every row, u1 and u3 `[P, r]`."""

    w1_A: Tensor
    w1_B: Tensor
    w3_A: Tensor
    w3_B: Tensor
    w2_A: Tensor
    w2_B: Tensor
    scaling: float
    u1: Tensor
    u3: Tensor

    @staticmethod
    def of(x_P: Tensor, factors: tuple[Tensor, ...] | list[Tensor], scaling: float) -> "_Bypass | None":
        if not factors:
            return None
        return _Bypass(*factors, scaling, x_P @ factors[0][0].t(), x_P @ factors[2][0].t())

    def add_inner(self, a: Tensor, b: Tensor, expert: int, start: int, end: int) -> None:
        """Add the bypass of w1 and w3 to a and b `[rows, F]` in place."""
        a += (self.u1[start:end] @ self.w1_B[expert].t()) * self.scaling
        b += (self.u3[start:end] @ self.w3_B[expert].t()) * self.scaling


@dataclass(slots=True)
class _BypassGrads:
    """Gradients of the factors; what is summed over experts is summed in at least float32."""

    w1_B: Tensor
    w3_B: Tensor
    w2_A: Tensor
    w2_B: Tensor
    du1: Tensor
    du3: Tensor

    @staticmethod
    def zeros(lora: _Bypass, x_P: Tensor) -> "_BypassGrads":
        wide = torch.promote_types(x_P.dtype, torch.float32)
        per_expert = (torch.zeros_like(t) for t in (lora.w1_B, lora.w3_B, lora.w2_A))
        du = (torch.zeros_like(lora.u1) for _ in range(2))
        return _BypassGrads(*per_expert, torch.zeros_like(lora.w2_B, dtype=wide), *du)

    def add(self, lora: _Bypass, expert: int, span: tuple[int, int], parts: tuple[Tensor, ...]) -> None:
        dy, dt, h, da, db = parts
        start, end = span
        t = h @ lora.w2_A[expert].t()
        self.w2_B[0] += (dy.t() @ t) * lora.scaling
        self.w2_A[expert] = dt.t() @ h
        self.w1_B[expert] = (da.t() @ lora.u1[start:end]) * lora.scaling
        self.w3_B[expert] = (db.t() @ lora.u3[start:end]) * lora.scaling
        self.du1[start:end] = (da @ lora.w1_B[expert]) * lora.scaling
        self.du3[start:end] = (db @ lora.w3_B[expert]) * lora.scaling

    def factors(self, x_P: Tensor) -> tuple[Tensor, ...]:
        """In the order of `ExpertLora.factors`, in the dtype of the rows."""
        w1_A, w3_A = (self.du1.t() @ x_P).unsqueeze(0), (self.du3.t() @ x_P).unsqueeze(0)
        return w1_A, self.w1_B, w3_A, self.w3_B, self.w2_A, self.w2_B.to(x_P.dtype)


def _dense_expert_mlp(
    x_P: Tensor, blocks: _Blocks, activation: _Activation, weights: DenseExperts, factors: tuple[Tensor, ...] | None
) -> Tensor:
    """The same function on dense weights with torch's own autograd, which reaches the weights too."""
    w1, w3, w2 = (w.to(x_P.dtype).unbind(0) for w in (weights.w1, weights.w3, weights.w2))
    lora = _Bypass.of(x_P, factors or (), activation.scaling)
    parts: list[Tensor] = []
    for expert, start, end in blocks.spans():
        x_e = x_P[start:end]
        a, b = x_e @ w1[expert].t(), x_e @ w3[expert].t()
        if lora:
            lora.add_inner(a, b, expert, start, end)
        h = situ_glu(a, b, activation.beta, activation.linear_beta)
        y_e = h @ w2[expert].t()
        if lora:
            y_e = y_e + (h @ lora.w2_A[expert].t() @ lora.w2_B[0].t()) * lora.scaling
        parts.append(y_e)
    return torch.cat(parts)


def _empty_result(x: Tensor, weights: Experts, lora: ExpertLora | None) -> Tensor:
    """`[0, L]` that still depends on every differentiable argument, so that their gradients are zeros and not None."""
    learnable = list(lora.factors()) if lora else []
    if isinstance(weights, DenseExperts):
        learnable += [weights.w1, weights.w3, weights.w2]
    return x + sum(t.sum() * 0 for t in learnable) if learnable else x.clone()
