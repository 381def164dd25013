"""Routed rows to the ranks that hold their experts, and back. The only collectives of the MoE layer.

Legend: T tokens of this rank, k experts a token, E experts of the model, E_l experts of this rank, N rows it receives.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from k31core.parallel.collectives import exchange, exchange_counts
from k31core.parallel.mesh import Axis


class Dispatched(NamedTuple):
    """Rows at their experts, and the way back."""

    rows: Tensor
    """`[N, L]`, sorted by local expert."""
    counts: Tensor
    """int64 `[E_l]` rows of every local expert."""
    order: Tensor
    """int64 `[T * k]`: the (token, slot) of every sent row."""
    regroup: Tensor | None
    """int64 `[N]`: received position of every sorted row; None with one rank."""
    sent: list[int] | None
    received: list[int] | None


def dispatch(x: Tensor, indices: Tensor, num_experts: int, ep: Axis) -> Dispatched:
    """Send each token's latent row `x [T, L]` to its experts `indices [T, k]` (global numbers)."""
    flat = indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    # not bincount: it waits for the device to learn the largest number
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    rows = x.index_select(0, order // indices.shape[1])
    if ep.size == 1:
        return Dispatched(rows, counts, order, None, None, None)
    by_source = exchange_counts(counts, ep)
    sent = counts.view(ep.size, -1).sum(1).tolist()
    received = by_source.sum(1).tolist()
    arrived = exchange(rows, ep, sent, received)
    experts = torch.arange(by_source.shape[1], device=x.device).expand_as(by_source).reshape(-1)
    regroup = torch.argsort(torch.repeat_interleave(experts, by_source.reshape(-1)), stable=True)
    return Dispatched(arrived.index_select(0, regroup), by_source.sum(0), order, regroup, sent, received)


def combine(y: Tensor, route: Dispatched, weights: Tensor, ep: Axis) -> Tensor:
    """Weighted sum over its experts of every token: y `[N, L]` in dispatched order, weights fp32 `[T, k]` -> `[T, L]`.

    Summed in fp32 in the order of the slots, so a token's result does not depend on its neighbours.
    """
    if ep.size > 1:
        assert route.regroup is not None
        y = exchange(y.index_select(0, torch.argsort(route.regroup)), ep, route.received, route.sent)
    slots = y.index_select(0, torch.argsort(route.order)).unflatten(0, weights.shape)
    total: Tensor | None = None
    for row, weight in zip(slots.unbind(1), weights.unsqueeze(-1).unbind(1), strict=True):
        term = row.to(weight.dtype) * weight
        total = term if total is None else total + term
    assert total is not None
    return total.to(y.dtype)
