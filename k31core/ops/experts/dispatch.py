"""Chooses the implementation of the experts operator: a fused kernel on the GPU, the reference everywhere else."""

from torch import Tensor

from k31core.ops.experts.reference import expert_mlp_reference
from k31core.ops.experts.weights import ExpertLora, Experts


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
    that a row's result is the same whoever shares the batch. Raises `ExpertShapeError` for arguments that do not fit.
    """
    return expert_mlp_reference(
        x, counts, weights, lora=lora, beta=beta, linear_beta=linear_beta, row_multiple=row_multiple
    )
