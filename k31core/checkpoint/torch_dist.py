"""Frozen weights as a megatron-core `torch_dist` checkpoint: written by any number of ranks, read at any layout.

The format and the resharding are megatron-core's dist_checkpointing; the keys are the logical names of our slots, so
the directory does not remember the layout that wrote it. Every rank calls both functions (collective).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from k31core.parallel.cpu_device import cpu_device
from k31core.parallel.mesh import Mesh
from k31core.parallel.sharding import Slot

FACTS = "k31_torch_dist.json"
"""Beside the checkpoint, written last: what it holds. A directory without it is half-converted."""


class TorchDistError(ValueError):
    """A torch_dist directory that cannot be used: names the directory, the values that disagree, the next step."""


def save_torch_dist(directory: Path, slots: Sequence[Slot], mesh: Mesh, facts: Mapping[str, Any]) -> None:
    """Write every slot of every rank once. `facts` (JSON values) identify the model."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise TorchDistError(f"{directory} is not empty: a conversion writes into a new directory")
    dist.barrier()
    with cpu_device():
        dist_checkpointing.save(_sharded(slots, mesh), str(directory))
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / FACTS).write_text(json.dumps(dict(facts), indent=1))
    dist.barrier()


def read_facts(directory: Path) -> dict[str, Any]:
    """What the directory holds. Raises TorchDistError for one that was not finished."""
    path = directory / FACTS
    if not path.is_file():
        raise TorchDistError(f"{path} is missing: {directory} is no finished torch_dist conversion; run it again")
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def load_torch_dist(directory: Path, slots: Sequence[Slot], mesh: Mesh, facts: Mapping[str, Any]) -> None:
    """Fill every slot of this rank, bit for bit. Raises TorchDistError when the directory is of another model.

    `source` in `facts` is compared only when the directory knows its own.
    """
    from megatron.core import dist_checkpointing

    found = read_facts(directory)
    unknown = {"source"} if found.get("source") is None else set()
    wrong = {key: (found.get(key), value) for key, value in facts.items() if found.get(key) != value}
    wrong = {key: pair for key, pair in wrong.items() if key not in unknown}
    if set(wrong) == {"source"}:
        raise TorchDistError(
            f"{directory} was made from another checkpoint of the same sizes than the one that is trained: convert "
            "again, or give the checkpoint it was made from"
        )
    if wrong:
        key, (theirs, ours) = next(iter(wrong.items()))
        raise TorchDistError(f"{directory} holds another model: {key} is {theirs!r} there and {ours!r} here")
    with cpu_device():
        loaded: dict[str, Tensor] = dist_checkpointing.load(_sharded(slots, mesh), str(directory))
    for slot in slots:
        tensor = loaded[slot.name]
        if tensor.data_ptr() != slot.tensor.data_ptr():
            slot.tensor.detach().copy_(tensor)


def _sharded(slots: Sequence[Slot], mesh: Mesh) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    state = {}
    for slot in slots:
        shard = slot.shard
        offsets = (
            [] if shard.whole else [(shard.dim, shard.start // shard.length, shard.shape[shard.dim] // shard.length)]
        )
        if ".experts." in slot.name:
            replica = mesh.expert_dp.rank
        else:
            replica = mesh.stage.rank if shard.whole else mesh.data.rank
        state[slot.name] = ShardedTensor.from_rank_offsets(
            slot.name, slot.tensor.detach(), *offsets, replica_id=replica
        )
    return state
