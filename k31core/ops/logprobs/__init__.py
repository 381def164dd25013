"""Log-probs of the label and of recorded candidates without full logits, and the sampler's top-k log-probs."""

from typing import Any

import torch

from k31core.ops.logprobs import reference
from k31core.ops.logprobs.reference import WordIdError, check_ids, topk_logprobs

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
    parallelism does). chunk: tokens whose logits exist at one time. The head gets a gradient only if it requires one.
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
    chosen = reference.chosen_logprobs(
        hidden,
        head,
        ids,
        temperature=temperature,
        vocab_start=vocab_start,
        valid_vocab=valid_vocab,
        group=group,
        chunk=chunk,
        reduce_grad=reduce_grad,
    )
    return chosen[:, 0], None if candidates is None else chosen[:, 1:]
