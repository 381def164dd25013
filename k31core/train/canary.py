"""Log-probs of a fixed sequence by a decoder in any layout: the check that engine and trainer hold the same adapter."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from k31core.model.decoder import Decoder, Packed
from k31core.parallel.pipeline import forward_stages
from k31core.train.step import head_logprobs


@torch.no_grad()
def score_sequence(decoder: Decoder, tokens: Sequence[int], *, chunk: int) -> list[float]:
    """`[n - 1]` log-probs at temperature 1 (token j + 1 given tokens 0..j), the same list on every rank. A
    collective."""
    mesh, device = decoder.build.mesh, decoder.build.device
    count = len(tokens)
    padding = -count % mesh.token_multiple
    ids = torch.tensor([*tokens, *[0] * padding], dtype=torch.int64, device=device)
    labels = torch.full_like(ids, -1)
    labels[: count - 1] = ids[1:count]
    bounds = [0, count, count + padding] if padding else [0, count]
    start, length = mesh.cp.slice_of(len(ids), "packed tokens")
    own = slice(start, start + length)
    batch = Packed(ids[own], torch.tensor(bounds, dtype=torch.int64, device=device))
    out = forward_stages(lambda received: decoder(batch, received), mesh, dtype=decoder.build.dtype)
    found = torch.zeros(len(ids), dtype=torch.float64, device=device)
    if mesh.last_stage:
        label, _ = head_logprobs(decoder, out, labels[own], None, temperature=1.0, chunk=chunk)
        found = _whole(label.to(torch.float64), decoder)
    if mesh.pp.size > 1:
        last = dist.get_global_rank(mesh.pp.group, mesh.pp.size - 1)
        dist.broadcast(found, src=last, group=mesh.pp.group)
    return [float(value) for value in found[: count - 1]]


def _whole(own: Tensor, decoder: Decoder) -> Tensor:
    """The values of every CP chunk, in order."""
    cp = decoder.build.mesh.cp
    if cp.size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(cp.size)]
    dist.all_gather(parts, own.contiguous(), group=cp.group)
    return torch.cat(parts)
