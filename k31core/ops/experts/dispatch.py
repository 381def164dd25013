"""Chooses the implementation of the experts operator: the fused kernel on a Hopper GPU, else the reference."""

import logging
from functools import cache

from torch import Tensor

from k31core.ops.experts.reference import expert_mlp_reference
from k31core.ops.experts.weights import ExpertLora, Experts, PackedExperts

_log = logging.getLogger(__name__)


def expert_mlp(
    x: Tensor,
    counts: Tensor,
    weights: Experts,
    *,
    lora: ExpertLora | None = None,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    row_multiple: int = 8,
) -> Tensor:
    """y `[N, L]`: every row through its expert, y = w2 h, h = SiTU-GLU(w1 x, w3 x), plus the LoRA bypass of each.

    x `[N, L]` holds the rows sorted by expert and counts int64 `[E]` how many each expert has (zero is fine). Gradients
    reach x, every factor of `lora`, and the weights of `DenseExperts`; packed weights are frozen and never dequantised
    as a layer. Computes in the dtype of x with the activation in float32. `row_multiple` pads each expert's block so
    that a row's result is the same whoever shares the batch (the GPU kernel's tiles are fixed anyway). Raises
    `ExpertShapeError` for arguments that do not fit.
    """
    if x.is_cuda and x.shape[0] and isinstance(weights, PackedExperts):
        from k31core.ops.experts.kernel import expert_mlp_kernel, unsupported

        reason = unsupported(x, weights, lora, beta)
        if reason is None:
            return expert_mlp_kernel(x, counts, weights, lora=lora, linear_beta=linear_beta)
        _log_once(reason)
    return expert_mlp_reference(
        x, counts, weights, lora=lora, beta=beta, linear_beta=linear_beta, row_multiple=row_multiple
    )


@cache
def _log_once(reason: str) -> None:
    _log.warning("experts run one at a time through the torch reference, not the fused kernel: %s", reason)
