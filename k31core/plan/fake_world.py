"""Any rank of any world in this one process: torch's `fake` process group, megatron-core's real group arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from k31core.parallel.groups import build_mesh, destroy_mesh
from k31core.parallel.mesh import Mesh
from k31core.recipe.train import ParallelRecipe


@contextmanager
def fake_mesh(layout: ParallelRecipe, rank: int) -> Iterator[Mesh]:
    """The mesh that `rank` would have; collectives on its groups do nothing. Not while a real group is there."""
    # Importing this module registers the backend; torch offers it nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process group is already initialised: plan in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield build_mesh(layout)
    finally:
        destroy_mesh()
        dist.destroy_process_group()
