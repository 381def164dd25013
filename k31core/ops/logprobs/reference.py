"""Log-probabilities of chosen words from hidden states and the output head, without the full logits: the CPU path.

Legend: T tokens, D hidden, V rows of this rank's vocabulary slice, K candidates a token. Word ids are global; this
rank holds ids `vocab_start .. vocab_start + V`. Ids of `valid_vocab` and above are padding of the head: probability
and gradient exactly zero. Logits, softmax and sums are fp32 (fp64 for fp64 hidden).
"""

from typing import Any

import torch
import torch.distributed as dist

from k31core.ops.rowstable import accumulate_dtype

PADDING = -1
"""The id that marks an unused label or candidate: its log-prob is -inf (a probability of 0) and it has no gradient."""


class WordIdError(ValueError):
    """A label or candidate id that is neither a word of the vocabulary nor padding."""


def check_ids(name: str, ids: torch.Tensor, valid_vocab: int) -> None:
    """Raise `WordIdError` for the first id outside -1 .. valid_vocab - 1; on a GPU a device-side assertion, without
    a sync."""
    bad = (ids < PADDING) | (ids >= valid_vocab)
    if ids.device.type == "cuda":
        torch._assert_async(~bad.any())
        return
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise WordIdError(
            f"{name}{where} is {int(ids[tuple(where)])}; word ids run from 0 to {valid_vocab - 1} and -1 marks padding"
        )


class _ChosenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ head^T / temperature)[ids], a chunk of tokens at a time; the backward recomputes the
    logits."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes flat arguments
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        ids: torch.Tensor,
        temperature: float,
        vocab_start: int,
        valid_vocab: int,
        group: Any,
        chunk: int,
        reduce_grad: bool,
    ) -> torch.Tensor:
        dtype = accumulate_dtype(hidden)
        chosen = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
        lse = torch.empty(len(ids), dtype=dtype, device=hidden.device)
        for begin in range(0, len(ids), chunk):
            at = slice(begin, begin + chunk)
            logits = _logits(hidden[at], head, temperature, vocab_start, valid_vocab)
            top = logits.amax(-1)
            if group is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            total = (logits - top[:, None]).exp().sum(-1)
            local, here = _local_ids(ids[at], vocab_start, logits.shape[1])
            picked = torch.where(here, torch.gather(logits, 1, local), 0.0)
            if group is not None:
                dist.all_reduce(total, group=group)
                dist.all_reduce(picked, group=group)
            lse[at] = top + total.log()
            chosen[at] = picked - lse[at, None]
        chosen.masked_fill_(ids < 0, float("-inf"))
        ctx.save_for_backward(hidden, head, ids, lse)
        ctx.options = (temperature, vocab_start, valid_vocab, group, chunk, reduce_grad)
        return chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, head, ids, lse = ctx.saved_tensors
        temperature, vocab_start, valid_vocab, group, chunk, reduce_grad = ctx.options
        grad = torch.where(ids < 0, 0.0, grads[0])
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_head = torch.zeros(head.shape, dtype=lse.dtype, device=head.device) if need_head else None
        for begin in range(0, len(ids), chunk):
            at = slice(begin, begin + chunk)
            logits = _logits(hidden[at], head, temperature, vocab_start, valid_vocab)
            slope = (logits - lse[at, None]).exp() * -grad[at].sum(-1, keepdim=True)
            local, here = _local_ids(ids[at], vocab_start, logits.shape[1])
            slope.scatter_add_(1, local, torch.where(here, grad[at], 0.0))
            slope /= temperature
            if grad_hidden is not None:
                part = slope @ head.to(slope.dtype)
                if group is not None and reduce_grad:
                    dist.all_reduce(part, group=group)
                grad_hidden[at] = part.to(hidden.dtype)
            if grad_head is not None:
                grad_head += slope.T @ hidden[at].to(slope.dtype)
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), *([None] * 7)


def _logits(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float, vocab_start: int, valid_vocab: int
) -> torch.Tensor:
    """`[chunk, V]` logits over the temperature, -inf for padded words."""
    dtype = accumulate_dtype(hidden)
    logits = (hidden.to(dtype) @ head.to(dtype).T) / temperature
    padded_from = max(valid_vocab - vocab_start, 0)
    if padded_from < head.shape[0]:
        logits[:, padded_from:] = float("-inf")
    return logits


def _local_ids(ids: torch.Tensor, vocab_start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of this rank's slice, clamped into it; whether the id really lies in the slice)."""
    local = ids - vocab_start
    here = (ids >= 0) & (local >= 0) & (local < rows)
    return local.clamp(0, rows - 1), here


def chosen_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float,
    vocab_start: int,
    valid_vocab: int,
    group: Any = None,
    chunk: int = 512,
    reduce_grad: bool = True,
) -> torch.Tensor:
    """log-probs `[T, K]` (fp32, fp64 for fp64 hidden) of `ids [T, K]`; the arguments of
    `label_and_candidate_logprobs`."""
    result = _ChosenLogprobs.apply(hidden, head, ids, temperature, vocab_start, valid_vocab, group, chunk, reduce_grad)
    return result  # type: ignore[no-any-return]


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best words of each row: (ids int64 `[B, k]`, log-probs fp32 `[B, k]`), best first; equal logits: smaller
    id first.

    logits: `[B, V]`, already over the temperature; -inf marks words that cannot be sampled. The log-probs are
    normalised over the whole row.
    """
    values = logits.to(accumulate_dtype(logits))
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]
    return order, torch.gather(torch.log_softmax(values, dim=-1), 1, order)
