"""DSA index selection in plain torch: the definition, and the CPU path.

Legend: Tq queries, Tk packed keys, Hi index heads, d index width, B decoding rows, S cache slots.
A query sees the key rows `key_start <= s < key_end` of the packed keys; `causal_ranges` makes these bounds for
training, and decoding uses 0 and the row's length. Selected keys are row numbers of the same packed axis.
"""

from itertools import pairwise

import torch

from k31core.ops.rowstable import accumulate_dtype

BLOCK = 64
"""Keys reduced together in decoding. Fixed, so that a row's sums do not depend on the longest row of its batch."""


def causal_ranges(cu_seqlens: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(key_start, key_end) int32 `[Tq]`: the keys of its own sequence up to itself, for every packed token or for
    `rows`.

    cu_seqlens: int `[n + 1]`. rows: int `[Tq]`, the packed positions of this rank's queries (context parallelism).
    """
    bounds = cu_seqlens.to(torch.int64)
    if rows is None:
        rows = torch.arange(int(bounds[-1]), device=cu_seqlens.device)
    rows = rows.to(torch.int64)
    sequence = torch.searchsorted(bounds, rows, right=True) - 1
    return bounds[sequence].to(torch.int32), (rows + 1).to(torch.int32)


def length_buckets(cu_seqlens: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """[(size, packed rows `[m, size]`, valid `[m, size]`)]: the sequences grouped by length rounded up to a power of
    two.

    Each group is one padded batch; rounding by a sequence's own length keeps its sums independent of its neighbours.
    Padding slots repeat the first row of their sequence and are not valid.
    """
    bounds = cu_seqlens.tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            groups.setdefault(max(8, 1 << (end - start - 1).bit_length()), []).append((start, end - start))
    buckets = []
    for size, members in sorted(groups.items()):
        start = torch.tensor([m[0] for m in members])[:, None]
        length = torch.tensor([m[1] for m in members])[:, None]
        offset = torch.arange(size)[None]
        valid = offset < length
        buckets.append((size, torch.where(valid, start + offset, start), valid))
    return buckets


def index_scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """I(t, s) = sum_h w_h(t) relu(q_h(t) . k(s)) d^-0.5 Hi^-0.5, fp32 `[Tq, Tk]` (fp64 for fp64 q); nothing is masked.

    q: `[Tq, Hi, d]`. k: `[Tk, d]`. w: `[Tq, Hi]`.
    """
    dtype = accumulate_dtype(q)
    heads, width = q.shape[1:]
    products = torch.relu(torch.einsum("qhd,kd->qhk", q.to(dtype), k.to(dtype)))
    return torch.einsum("qhk,qh->qk", products, w.to(dtype)) * (width**-0.5 * heads**-0.5)


def select_topk(scores: torch.Tensor, topk: int, key_start: torch.Tensor, key_end: torch.Tensor) -> torch.Tensor:
    """The `topk` best visible keys of each query: int32 `[Tq, topk]`, ascending, then -1 where fewer keys are visible.

    scores: `[Tq, Tk]`. key_start, key_end: int `[Tq]`. Equal scores: the larger key index wins. All visible keys are
    taken while there are at most `topk` of them.
    """
    keys = scores.shape[1]
    position = torch.arange(keys, device=scores.device)
    visible = (position >= key_start[:, None]) & (position < key_end[:, None])
    reversed_scores = scores.masked_fill(~visible, float("-inf")).flip(1)
    order = torch.sort(reversed_scores, dim=1, descending=True, stable=True).indices[:, :topk]
    chosen = keys - 1 - order
    # an invisible key is moved past every real one, so that sorting leaves it at the end of the row
    chosen = torch.where(torch.gather(visible, 1, chosen), chosen, keys).sort(dim=1).values
    chosen = torch.where(chosen == keys, -1, chosen).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1)


@torch.no_grad()
def select_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    topk: int,
    rows: torch.Tensor | None = None,
    chunk: int = 1024,
) -> torch.Tensor:
    """Index scores and selection for packed sequences: int32 `[Tq, topk]` rows of the packed keys. No gradient.

    q: `[Tq, Hi, d]`, k: `[Tk, d]`, w: `[Tq, Hi]`, cu_seqlens: int `[n + 1]` over the keys; rows: int `[Tq]` when the
    queries are not all the packed tokens. About `chunk` queries are scored at a time, each against the keys of its own
    sequence (with `rows`: against all the keys from the first to the last that any of them sees).
    """
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    key_start, key_end = causal_ranges(cu_seqlens, rows)
    if rows is not None:
        for begin in range(0, q.shape[0], chunk):
            at = slice(begin, begin + chunk)
            low, high = int(key_start[at].min()), int(key_end[at].max())
            scores = index_scores(q[at], k[low:high], w[at])
            selected[at] = _shift(select_topk(scores, topk, key_start[at] - low, key_end[at] - low), low)
        return selected
    for size, packed, valid in length_buckets(cu_seqlens):
        together = max(1, chunk // size)
        for begin in range(0, len(packed), together):
            group, real = packed[begin : begin + together].to(q.device), valid[begin : begin + together].to(q.device)
            for first in range(0, size, chunk):
                at = group[:, first : first + chunk]
                scores = torch.stack([index_scores(q[r], k[keys], w[r]) for r, keys in zip(at, group)])
                low = group[:, :1].expand_as(at)
                ends = torch.where(real[:, first : first + chunk], key_end[at] - low, 0)
                part = select_topk(scores.flatten(0, 1), topk, torch.zeros_like(ends).flatten(), ends.flatten())
                keep = real[:, first : first + chunk]
                selected[at[keep]] = _shift(part.view(*at.shape, topk), low[..., None])[keep]
    return selected


def _shift(indices: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """Add `by` to every index but the -1s."""
    return torch.where(indices >= 0, indices + by, -1).to(torch.int32)


def index_scores_step(q: torch.Tensor, keys: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The scores of one query a row against its own cache: fp32 `[B, S]`, the same bits for a row in any batch.

    q: `[B, Hi, d]`. keys: `[B, S, d]`. w: `[B, Hi]`. Slots past a row's length hold anything; `select_topk` hides them.
    """
    dtype = accumulate_dtype(q)
    rows, slots, width = keys.shape
    heads = q.shape[1]
    blocks = -(-slots // BLOCK)
    padded = torch.nn.functional.pad(keys.to(dtype), (0, 0, 0, blocks * BLOCK - slots)).view(
        rows * blocks, BLOCK, width
    )
    query = q.to(dtype)[:, None].expand(-1, blocks, -1, -1).reshape(rows * blocks, heads, width)
    products = torch.relu(torch.bmm(query, padded.transpose(1, 2)))  # one product of a fixed shape for each block
    scores = (products.view(rows, blocks, heads, BLOCK) * w.to(dtype)[:, None, :, None]).sum(2)
    return scores.view(rows, blocks * BLOCK)[:, :slots] * (width**-0.5 * heads**-0.5)
