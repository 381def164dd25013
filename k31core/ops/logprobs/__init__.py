"""Log-probs of the label and of recorded candidates without full logits, and the sampler's top-k log-probs."""

from typing import Any

import torch

from k31core.ops.dispatch import kernel_usable
from k31core.ops.logprobs import reference
from k31core.ops.logprobs.reference import WordIdError, check_ids

__all__ = ["WordIdError", "label_and_candidate_logprobs", "topk_logprobs"]


def label_and_candidate_logprobs(  # noqa: PLR0913 - one call holds the whole head
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    temperature: float,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    group: Any = None,
    chunk: int = 512,
    reduce_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(label log-probs fp32 `[T]`, candidate log-probs fp32 `[T, K]` or None) over the full vocabulary at
    `temperature`.

    hidden: `[T, D]`, after the final norm. head: `[V, D]`, this rank's slice of the output head. labels: int64 `[T]`;
    candidates: int64 `[T, K]`; ids are global and -1 is padding, which returns -inf and has no gradient.
    vocab_start: first word of the slice. valid_vocab: words of the model; larger ids in the head are padding and get
    exactly zero probability and gradient; None means the head has no padding (not allowed with `group`).
    group: process group whose ranks hold the slices. With it every rank returns the same values; `reduce_grad` sums
    the gradient of hidden over the group (turn it off when the caller's own collective does that, as sequence
    parallelism does). chunk: tokens whose logits exist at one time on CPU (the GPU kernel has its own blocks). The
    head gets a gradient only if it requires one.
    """
    if valid_vocab is None:
        if group is not None:
            raise ValueError(
                "label_and_candidate_logprobs: pass valid_vocab (the model's word count) together with group"
            )
        valid_vocab = vocab_start + head.shape[0]
    ids = labels[:, None] if candidates is None else torch.cat([labels[:, None], candidates], dim=1)
    check_ids("labels", labels, valid_vocab)
    if candidates is not None:
        check_ids("candidates", candidates, valid_vocab)
    options: dict[str, Any] = {
        "temperature": temperature,
        "vocab_start": vocab_start,
        "valid_vocab": valid_vocab,
        "group": group,
        "reduce_grad": reduce_grad,
    }
    problem = "the head is trained" if torch.is_grad_enabled() and head.requires_grad else None
    if head.dtype != hidden.dtype:
        problem = f"hidden is {hidden.dtype} and the head is {head.dtype}"
    if kernel_usable("label_and_candidate_logprobs", hidden, dtypes=(torch.bfloat16,), problem=problem):
        from k31core.ops.logprobs import kernel

        chosen = kernel.chosen_logprobs(hidden, head, ids, **options)
    else:
        chosen = reference.chosen_logprobs(hidden, head, ids, chunk=chunk, **options)
    return chosen[:, 0], None if candidates is None else chosen[:, 1:]


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best words of each row: (ids int64 `[B, k]`, log-probs fp32 `[B, k]`), best first; equal logits: smaller
    id first.

    logits: `[B, V]`, already over the temperature; -inf marks words that cannot be sampled. The log-probs are
    normalised over the whole row.
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"topk_logprobs: k is {k}; it must be between 1 and the number of words, {logits.shape[1]}")
    problem = (
        "k is above 256" if k > 256 else "the words of a row are not neighbours" if logits.stride(1) != 1 else None
    )
    if kernel_usable("topk_logprobs", logits, dtypes=(torch.bfloat16, torch.float32), problem=problem):
        from k31core.ops.logprobs import kernel_topk

        return kernel_topk.topk_logprobs(logits, k)
    return reference.topk_logprobs(logits, k)
