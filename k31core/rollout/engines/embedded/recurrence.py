"""The delta rule's decoding step in place: the state is read and written once instead of copied three times.

Equal to `k31core.ops.kda.kda_step` to rounding (tested); a row has the same bits in any batch, because every matrix
product has the shape of one head.
"""

import torch
from torch import Tensor


def delta_step_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """o `[B, H, V]` in the dtype of v; `state` fp32 `[B, H, K, V]` is advanced in place.

    q, k, g: `[B, H, K]`, q and k L2-normalised (q is scaled by K ** -0.5 here); v: `[B, H, V]`; beta: `[B, H]`.
    """
    dtype = state.dtype
    query, key, value, decay = (x.to(dtype) for x in (q, k, v, g))
    state.mul_(decay.exp()[..., None])
    seen = key[..., None, :] @ state  # [B, H, 1, V]
    update = beta.to(dtype)[..., None, None] * (value[..., None, :] - seen)
    state.addcmul_(key[..., None], update)
    scaled = query * q.shape[-1] ** -0.5
    return torch.matmul(scaled[..., None, :], state)[..., 0, :].to(v.dtype)
