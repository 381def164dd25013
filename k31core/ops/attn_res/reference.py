"""AttnRes mix in plain torch: the definition, and the CPU path.

Legend: T tokens, D hidden, n snapshots in the bank.
"""

from collections.abc import Sequence

import torch

from k31core.ops.rowstable import accumulate_dtype


def attn_res_mix(
    bank: torch.Tensor | Sequence[torch.Tensor],
    prefix: torch.Tensor,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Softmax-weighted sum of the snapshots and the running sum, `[T, D]` in the dtype of `prefix`.

    bank: n snapshots `[T, D]` (a list, or one `[n, T, D]` tensor; n may be 0). prefix: `[T, D]`, the running
    residual sum. norm_weight: `[D]`. proj_weight: `[1, D]`. eps: of the RMS norm. Statistics in fp32 (fp64 for fp64
    input).

    score_j = sum_d (row_j / rms(row_j)) * norm_weight * proj_weight; the softmax runs over the n + 1 rows; the raw
    rows are summed.
    """
    dtype = accumulate_dtype(prefix)
    rows = [row.to(dtype) for row in (*bank, prefix)]
    direction = norm_weight.to(dtype) * proj_weight.to(dtype).reshape(-1)
    scores = [(row * direction).sum(-1) * torch.rsqrt(row.square().mean(-1) + eps) for row in rows]
    weights = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
    mixed = weights[:, 0:1] * rows[0]
    for j in range(1, len(rows)):  # a fixed order of additions, so a token's result does not depend on T
        mixed = mixed + weights[:, j : j + 1] * rows[j]
    return mixed.to(prefix.dtype)
