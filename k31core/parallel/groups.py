"""The mesh of this rank from megatron-core's process groups.

Rank order is megatron-core's: TP varies fastest, then CP, then DP, then PP; an EP group is consecutive ranks of a
stage.
"""

from datetime import timedelta

import torch.distributed as dist

from k31core.parallel.mesh import Axis, LayoutError, Mesh
from k31core.recipe.train import ParallelRecipe


def build_mesh(layout: ParallelRecipe, *, timeout_minutes: int = 60, gloo_twins: bool = False) -> Mesh:
    """Create every group and return this rank's mesh; needs an initialised default process group.

    gloo_twins: also create megatron-core's gloo copies of the data groups (its own checkpoints need them, ours do not).
    Imports megatron-core, which takes 12-30 s the first time in a process.
    """
    world = dist.get_world_size()
    if world != layout.world_size:
        raise LayoutError(
            f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp} = {layout.world_size} ranks, "
            f"but the world has {world}"
        )
    from megatron.core import parallel_state as state

    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=gloo_twins,
    )
    return Mesh(
        tp=_axis(state.get_tensor_model_parallel_group()),
        cp=_axis(state.get_context_parallel_group()),
        dp=_axis(state.get_data_parallel_group()),
        pp=_axis(state.get_pipeline_model_parallel_group()),
        ep=_axis(state.get_expert_model_parallel_group()),
        expert_dp=_axis(state.get_expert_data_parallel_group()),
        data=_axis(state.get_data_parallel_group(with_context_parallel=True)),
        stage=_axis(state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        model=_axis(state.get_model_parallel_group()),
        sequence_parallel=layout.sequence_parallel,
    )


def first_complaint(complaint: str | None) -> str | None:
    """Wait for every rank; the complaint of the lowest rank that has one, on all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return complaint
    all_of_them: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, complaint)
    return next((seen for seen in all_of_them if seen is not None), None)


def destroy_mesh() -> None:
    """Forget the groups, so that another mesh can be built in this process (tests, planning)."""
    from megatron.core import parallel_state as state

    state.destroy_model_parallel()


def init_process_group(backend: str, init_method: str, rank: int, world_size: int, timeout_minutes: float) -> None:
    """The default group; `backend` is `nccl` or `gloo`."""
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(minutes=timeout_minutes)
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    size = dist.get_world_size(group)
    return Axis(size, dist.get_rank(group), group if size > 1 else None)
