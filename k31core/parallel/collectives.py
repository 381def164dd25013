"""The collectives of the model, each with its backward. Every one is the identity on an axis of size 1.

megatron-core's mappings do the work; they are imported only when an axis has more than one rank. Shapes are given for
one rank; T is a CP rank's tokens.

A tensor-parallel region lies between `enter_tp` and `leave_tp`: inside it every TP rank sees all T tokens and computes
a part of the result (its heads, its columns), so the gradient at its entrance is a sum over TP, and so is the gradient
of every tensor that all TP ranks hold alike.
"""

import torch
from torch import Tensor

from k31core.parallel.mesh import Axis, Mesh


def enter_tp(x: Tensor, mesh: Mesh) -> Tensor:
    """Into a tensor-parallel region: `[T/tp, D]` (sequence parallel) or `[T, D]` -> `[T, D]`; backward sums over TP."""
    if mesh.tp.size == 1:
        return x
    from megatron.core.tensor_parallel import mappings

    if mesh.sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=mesh.tp.group)
    return mappings.copy_to_tensor_model_parallel_region(x, group=mesh.tp.group)


def leave_tp(partial: Tensor, mesh: Mesh) -> Tensor:
    """Out of a tensor-parallel region: the sum over TP of `[T, D]`, whole or (sequence parallel) this rank's slice."""
    if mesh.tp.size == 1:
        return partial
    from megatron.core.tensor_parallel import mappings

    if mesh.sequence_parallel:
        return mappings.reduce_scatter_to_sequence_parallel_region(partial, group=mesh.tp.group)
    return mappings.reduce_from_tensor_model_parallel_region(partial, group=mesh.tp.group)


def own_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """This TP rank's slice `[T/tp, ..]` of tokens that all TP ranks hold; already so under sequence parallelism."""
    if mesh.tp.size == 1 or mesh.sequence_parallel:
        return x
    from megatron.core.tensor_parallel import mappings

    return mappings.scatter_to_sequence_parallel_region(x, group=mesh.tp.group)


def all_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """Inverse of `own_tokens`: what follows is the same on every TP rank, so backward takes the own slice."""
    if mesh.tp.size == 1 or mesh.sequence_parallel:
        return x
    from megatron.core.tensor_parallel import mappings

    return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=mesh.tp.group)


def slice_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of something given for all T tokens and without gradient (routing indices): `[T/tp, ..]`."""
    start, length = mesh.tp.slice_of(x.shape[0], "packed tokens of a CP rank")
    return x[start : start + length]


def gather_sequence(x: Tensor, cp: Axis) -> Tensor:
    """`[T, ..]` of every CP rank, in order: `[cp * T, ..]`; backward sums over CP and keeps the own chunk."""
    if cp.size == 1:
        return x
    from megatron.core.tensor_parallel import mappings

    return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=cp.group)


def heads_to_sequence(x: Tensor, cp: Axis) -> Tensor:
    """All-to-all: `[T, H, ..]` (own tokens, all local heads) -> `[cp * T, H/cp, ..]` (all tokens, own heads)."""
    if cp.size == 1:
        return x
    tokens, heads = x.shape[:2]
    cp.slice_of(heads, "KDA heads of a TP rank (context parallelism exchanges heads for sequence)")
    by_owner = x.reshape(tokens, cp.size, heads // cp.size, *x.shape[2:]).transpose(0, 1)
    return exchange(by_owner.flatten(0, 1), cp)


def sequence_to_heads(x: Tensor, cp: Axis) -> Tensor:
    """Inverse of `heads_to_sequence`: `[cp * T, H/cp, ..]` -> `[T, H, ..]`."""
    if cp.size == 1:
        return x
    back = exchange(x, cp)
    by_owner = back.reshape(cp.size, back.shape[0] // cp.size, *back.shape[1:]).transpose(0, 1)
    return by_owner.flatten(1, 2)


def exchange(x: Tensor, axis: Axis, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """All-to-all of rows over `axis`; equal splits, or `sent[i]` rows to rank i and `received[i]` rows from it."""
    if axis.size == 1:
        return x
    from megatron.core.tensor_parallel import mappings

    return mappings.all_to_all(axis.group, x.contiguous(), received, sent)


def exchange_counts(counts: Tensor, axis: Axis) -> Tensor:
    """Rows every rank of `axis` has for every own expert: int64 `[E]` -> `[axis, E/axis]`. No gradient."""
    if axis.size == 1:
        return counts[None]
    gathered = torch.empty_like(counts)
    torch.distributed.all_to_all_single(gathered, counts.contiguous(), group=axis.group)
    return gathered.view(axis.size, -1)
