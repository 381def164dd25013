"""All experts of a layer in one batched product, for models whose experts are small.

The experts operator of the trainer takes one expert after another, which is right when an expert is large and a waste
of calls when it has a thousand weights. Here every expert's rows stand in a block of the same capacity. Which of the
two computes a layer depends on the model alone, never on the batch, so a row's bits stay the same in any batch.

Legend: T tokens, E experts, k experts a token, c capacity (rows of the fullest expert, padded), L latent, F expert
width, r rank.
"""

import torch
from torch import Tensor

from k31core.model.experts import RoutedExperts
from k31core.model.moe import Moe
from k31core.ops.experts import PackedExperts
from k31core.ops.mxfp4 import decode
from k31core.ops.situ import situ_glu


class BatchedExperts:
    """The routed part of one layer with its experts decoded once."""

    def __init__(self, moe: Moe) -> None:
        weights = moe.experts.weights()
        assert isinstance(weights, PackedExperts)
        dtype = moe.routed_expert_down_proj.weight.dtype
        packed = weights.tensors()
        w1, w3, w2 = (decode(packed[i], packed[i + 1], dtype) for i in (0, 2, 4))
        self._moe = moe
        self._w1, self._w3, self._w2 = (w.transpose(1, 2).contiguous() for w in (w1, w3, w2))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(routed output `[T, D]`, experts chosen int64 `[T, k]`) of x `[T, D]`; the shared expert is not in it."""
        moe = self._moe
        indices, weights = moe.route(x)
        latent = moe.routed_expert_down_proj(x)
        slots, capacity = _slots(indices, moe.num_experts, moe.experts.row_multiple)
        blocks = latent.new_zeros(moe.num_experts * capacity, latent.shape[1])
        blocks[slots] = latent.repeat_interleave(indices.shape[1], dim=0)
        y = self._mlp(blocks.view(moe.num_experts, capacity, -1)).flatten(0, 1)[slots].unflatten(0, indices.shape)
        mixed = y[:, 0] * weights[:, 0, None]
        for slot in range(1, indices.shape[1]):
            mixed = mixed + y[:, slot] * weights[:, slot, None]
        return moe.routed_expert_up_proj(moe.routed_expert_norm(mixed.to(x.dtype))), indices

    def _mlp(self, rows: Tensor) -> Tensor:
        """`[E, c, L]` -> `[E, c, L]`."""
        experts = self._moe.experts
        a, b = rows @ self._w1, rows @ self._w3
        lora = experts.lora()
        if lora is None:
            return situ_glu(a, b, beta=experts.beta, linear_beta=experts.linear_beta) @ self._w2
        w1_A, w1_B, w3_A, w3_B, w2_A, w2_B = (factor.to(rows.dtype).transpose(1, 2) for factor in lora.factors())
        a.baddbmm_(rows @ w1_A, w1_B, alpha=lora.scaling)
        b.baddbmm_(rows @ w3_A, w3_B, alpha=lora.scaling)
        h = situ_glu(a, b, beta=experts.beta, linear_beta=experts.linear_beta)
        return (h @ self._w2).add_((h @ w2_A) @ w2_B, alpha=lora.scaling)


def _slots(indices: Tensor, experts: int, row_multiple: int) -> tuple[Tensor, int]:
    """(row of every (token, slot) in blocks of `capacity`, int64 `[T * k]`; the capacity)."""
    flat = indices.reshape(-1)
    chosen = torch.nn.functional.one_hot(flat, experts)
    before = chosen.cumsum(0)
    capacity = -(-int(before[-1].max()) // row_multiple) * row_multiple
    return flat * capacity + before.gather(1, flat[:, None]).squeeze(1) - 1, capacity


def dense_bytes(experts: RoutedExperts, dtype: torch.dtype) -> int:
    """Memory of one layer's decoded experts."""
    weights = experts.weights()
    elements: int = 3 * weights.num_experts * weights.ffn * weights.latent
    return elements * int(dtype.itemsize)
