"""The pipeline schedule: megatron-core's 1F1B over stages that pass one tensor of any shape.

Virtual pipelines are not offered: in megatron-core 0.19.2 they are silently wrong without overlapped point-to-point
calls.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k31core.parallel.mesh import Mesh

Stage = Callable[[int, Tensor | None], Tensor]
"""(number of the microbatch, what the previous stage sent or None on the first) -> what goes to the next stage, or on
the
last stage the loss, a scalar already divided by the global normaliser."""


def run_1f1b(stage: Stage, count: int, mesh: Mesh, *, dtype: torch.dtype, hidden_size: int) -> None:
    """Forward and backward of `count` microbatches through all stages; gradients stay in the parameters of each.

    Every rank calls it with the same `count`. The tensors between stages are `[n, T, D]` of `dtype`; n and T may differ
    from one microbatch to the next, so their shapes travel before them.
    """
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=mesh.pp.size,
        hidden_size=hidden_size,
        num_attention_heads=1,
        pipeline_model_parallel_size=mesh.pp.size,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
    )
    link = _StageLink(config)

    def forward_step(numbers: "_Numbers", model: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple]]:
        out = stage(numbers.next(), link.received)
        return out, lambda loss: (loss, torch.zeros([], dtype=torch.int, device=loss.device), None)

    forward_backward_pipelining_without_interleaving(
        forward_step_func=forward_step,
        data_iterator=_Numbers(),
        model=link,
        num_microbatches=count,
        seq_length=1,  # unused: shapes travel with the tensors
        micro_batch_size=1,
    )


def forward_stages(stage: Callable[[Tensor | None], Tensor], mesh: Mesh, *, dtype: torch.dtype) -> Tensor:
    """One forward pass through all stages without gradients; what this rank's `stage` returned. A collective.

    `stage` gets what the previous stage returned (None on the first). The tensors between stages are `[n, T, D]`.
    """
    received = None
    if not mesh.first_stage:
        previous = dist.get_global_rank(mesh.pp.group, mesh.pp.rank - 1)
        shape = torch.empty(3, dtype=torch.int64, device=_device())
        dist.recv(shape, previous, group=mesh.pp.group)
        received = torch.empty(shape.tolist(), dtype=dtype, device=_device())
        dist.recv(received, previous, group=mesh.pp.group)
    out = stage(received)
    if not mesh.last_stage:
        following = dist.get_global_rank(mesh.pp.group, mesh.pp.rank + 1)
        dist.send(torch.tensor(out.shape, dtype=torch.int64, device=_device()), following, group=mesh.pp.group)
        dist.send(out.contiguous(), following, group=mesh.pp.group)
    return out


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class _StageLink(nn.Module):
    """What the schedule wants of a model: a configuration, and a place for the received tensor."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.received = tensors[0]


class _Numbers:
    """Counts the microbatches in forward order."""

    def __init__(self) -> None:
        self._following = 0

    def next(self) -> int:
        self._following += 1
        return self._following - 1
