"""The logits of a step never exist whole: the largest tensors of the loss are a chunk's."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k31core.ops.logprobs import label_and_candidate_logprobs

TOKENS, WIDTH, WORDS, CHUNK, CANDIDATES = 256, 8, 640, 16, 12


class _Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.entries = max(self.entries, leaf.numel())
        return out


def largest(chunk: int) -> int:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    head = torch.randn(WORDS, WIDTH, generator=generator)
    labels = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    rows = [np.random.default_rng(i).permutation(WORDS)[:CANDIDATES] for i in range(TOKENS)]
    candidates = torch.from_numpy(np.stack(rows))
    with _Largest() as seen, torch.autograd.set_multithreading_enabled(False):
        label, candidate = label_and_candidate_logprobs(
            hidden, head, labels, candidates, temperature=1.0, vocab_start=0, valid_vocab=WORDS, group=None, chunk=chunk
        )
        (label.sum() + candidate.sum()).backward()
    assert hidden.grad is not None and bool(hidden.grad.any())
    return seen.entries


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    assert largest(CHUNK) <= max(CHUNK * WORDS, WORDS * WIDTH, TOKENS * CANDIDATES)
    assert largest(TOKENS) >= TOKENS * WORDS  # what is seen without chunks
