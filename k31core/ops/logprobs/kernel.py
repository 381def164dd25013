"""Chosen log-probs on a GPU: cuBLAS products with fp32 results into one small reused buffer, reduced at once by Triton.

Forward, for a block of tokens and a slice of the vocabulary at a time: logits = hidden @ slice^T in fp32 (bf16
operands), then one kernel folds the slice into a running maximum and sum of exponentials and picks the chosen words
that lie in it. Backward: the slice's logits again, turned into d loss / d logits (bf16, the operand of the second
product), and d hidden += that @ slice with fp32 accumulation. Transient memory: `TOKENS * WORDS` fp32 forward, with
a bf16 copy and one fp32 `TOKENS * D` block backward, whatever the vocabulary is.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

TOKENS = 4096
"""Tokens whose logits exist at one time."""
WORDS = 8192
"""Words of the head whose logits exist at one time."""
BLOCK = 8192
"""Logits a reducing program reads at one time; a power of two."""


@triton.jit
def _fold(
    logits, ids, picked, top, total, chosen, words, valid, first_id, inverse_temperature, stride,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Fold one slice's logits into (top, total) of its token, and store the logits of the chosen words found in it."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    best = tl.load(top + token)
    summed = tl.load(total + token)
    for begin in range(0, words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        x = tl.load(row + word, mask=word < valid, other=float("-inf")) * inverse_temperature
        new_best = tl.maximum(best, tl.max(x, 0))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a slice of padding alone has no finite logit yet
        summed = summed * tl.exp(best - safe) + tl.sum(tl.exp(x - safe), 0)
        best = new_best
    tl.store(top + token, best)
    tl.store(total + token, summed)
    slot = tl.arange(0, CHOSEN)
    word = tl.load(ids + token * chosen + slot, mask=slot < chosen, other=-1) - first_id
    here = (word >= 0) & (word < valid)
    tl.store(picked + token * chosen + slot, tl.load(row + word, mask=here, other=0.0) * inverse_temperature, mask=here)


@triton.jit
def _slopes(
    logits, slopes, ids, pulls, pull_sum, lse, chosen, words, valid, first_id, inverse_temperature, stride,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """d loss / d logit of one slice: (pull of the word - p * sum of pulls) / temperature; exactly 0 for padded
    words."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    out = slopes + token * stride
    level = tl.load(lse + token)
    weight = tl.load(pull_sum + token)
    for begin in range(0, words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        x = tl.load(row + word, mask=word < valid, other=float("-inf")) * inverse_temperature
        slope = -weight * tl.exp(x - level) * inverse_temperature
        tl.store(out + word, slope.to(slopes.dtype.element_ty), mask=word < words)
    tl.debug_barrier()  # the stores above and below meet in the chosen words
    slot = tl.arange(0, CHOSEN)
    word = tl.load(ids + token * chosen + slot, mask=slot < chosen, other=-1) - first_id
    here = (word >= 0) & (word < valid)
    x = tl.load(row + word, mask=here, other=0.0) * inverse_temperature
    pull = tl.load(pulls + token * chosen + slot, mask=slot < chosen, other=0.0)
    slope = (pull - weight * tl.exp(x - level)) * inverse_temperature
    tl.store(out + word, slope.to(slopes.dtype.element_ty), mask=here)


@triton.jit
def _combine_pulls(ids, grads, pulls, chosen, CHOSEN: tl.constexpr):
    """Give every occurrence of a word in a token's list the sum over its occurrences (the label is usually a
    candidate too)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, CHOSEN)
    word = tl.load(ids + token * chosen + slot, mask=slot < chosen, other=-1)
    total = tl.zeros([CHOSEN], dtype=tl.float32)
    for other in range(0, chosen):
        total += tl.where(word == tl.load(ids + token * chosen + other), tl.load(grads + token * chosen + other), 0.0)
    tl.store(pulls + token * chosen + slot, total, mask=slot < chosen)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out (fp32) = a @ b for bf16 a, b, fp32 accumulation and result."""
    if a.device.type == "cuda":
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:  # the interpreter's tests on CPU
        out.copy_(a.float() @ b.float())


def _accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total (fp32) += a @ b for bf16 a, b."""
    if a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        ids: torch.Tensor,
        temperature: float,
        vocab_start: int,
        valid_vocab: int,
        group: Any,
        reduce_grad: bool,
    ) -> torch.Tensor:
        tokens, chosen = ids.shape
        picked = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
        top = torch.full((tokens,), float("-inf"), dtype=torch.float32, device=hidden.device)
        total = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        for at, slab, logits, valid, first in _slices(hidden, head, vocab_start, valid_vocab):
            _product(hidden[at], slab.T, logits)
            _fold[(logits.shape[0],)](
                logits, ids[at], picked[at], top[at], total[at], chosen, logits.shape[1], valid, first,
                1.0 / temperature, logits.stride(0),
                BLOCK=BLOCK, CHOSEN=triton.next_power_of_2(chosen), num_warps=8,
            )  # fmt: skip
        if group is not None:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            total *= (top - highest).exp()
            dist.all_reduce(total, group=group)
            dist.all_reduce(picked, group=group)
            top = highest
        lse = top + total.log()
        ctx.save_for_backward(hidden, head, ids, lse)
        ctx.options = (temperature, vocab_start, valid_vocab, group, reduce_grad)
        return (picked - lse[:, None]).masked_fill_(ids < 0, float("-inf"))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        hidden, head, ids, lse = ctx.saved_tensors
        temperature, vocab_start, valid_vocab, group, reduce_grad = ctx.options
        tokens, chosen = ids.shape
        padded = triton.next_power_of_2(chosen)
        grads = torch.where(ids < 0, 0.0, grad_outputs[0].float()).contiguous()
        pull_sum, pulls = grads.sum(-1), torch.empty_like(grads)
        _combine_pulls[(tokens,)](ids, grads, pulls, chosen, CHOSEN=padded, num_warps=4)
        grad_hidden = torch.empty_like(hidden)
        rows = min(tokens, TOKENS)
        slopes_buffer = torch.empty(rows, min(WORDS, head.shape[0]), dtype=hidden.dtype, device=hidden.device)
        total_buffer = torch.empty(rows, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for at, slab, logits, valid, first in _slices(hidden, head, vocab_start, valid_vocab):
            slopes = slopes_buffer.view(-1)[: logits.numel()].view(logits.shape)
            total = total_buffer[: logits.shape[0]]
            if first == vocab_start:
                total.zero_()
            _product(hidden[at], slab.T, logits)
            _slopes[(logits.shape[0],)](
                logits, slopes, ids[at], pulls[at], pull_sum[at], lse[at], chosen, logits.shape[1], valid, first,
                1.0 / temperature, logits.stride(0), BLOCK=BLOCK, CHOSEN=padded, num_warps=8,
            )  # fmt: skip
            _accumulate(total, slopes, slab)
            if first + slab.shape[0] == vocab_start + head.shape[0]:
                if group is not None and reduce_grad:
                    dist.all_reduce(total, group=group)
                grad_hidden[at] = total
        return grad_hidden, *([None] * 7)


def _slices(hidden: torch.Tensor, head: torch.Tensor, vocab_start: int, valid_vocab: int) -> Any:
    """(token slice, rows of the head, fp32 logits buffer, valid words, first id) for every block; the buffer is
    reused."""
    buffer = torch.empty(
        min(hidden.shape[0], TOKENS) * min(WORDS, head.shape[0]), dtype=torch.float32, device=hidden.device
    )
    for begin in range(0, hidden.shape[0], TOKENS):
        at = slice(begin, min(begin + TOKENS, hidden.shape[0]))
        for low in range(0, head.shape[0], WORDS):
            slab = head[low : low + WORDS]
            first = vocab_start + low
            valid = max(0, min(valid_vocab - first, slab.shape[0]))
            shape = (at.stop - at.start, slab.shape[0])
            yield at, slab, buffer[: shape[0] * shape[1]].view(shape), valid, first


def chosen_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float,
    vocab_start: int,
    valid_vocab: int,
    group: Any = None,
    reduce_grad: bool = True,
) -> torch.Tensor:
    """log-probs fp32 `[T, K]` of `ids [T, K]`; bf16 hidden and head, frozen head."""
    result: torch.Tensor = _ChosenLogprobs.apply(
        hidden.contiguous(), head, ids.contiguous(), temperature, vocab_start, valid_vocab, group, reduce_grad
    )
    return result
