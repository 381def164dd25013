"""Choosing between an op's reference and its kernel, and saying once why a kernel was not used."""

import logging

import torch

log = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()


def note_fallback(op: str, reason: str) -> None:
    """Log, once per process and reason, that `op` runs its reference on a GPU."""
    if (op, reason) not in _said:
        _said.add((op, reason))
        log.warning("%s: running the torch reference on a GPU because %s", op, reason)


def kernel_usable(op: str, x: torch.Tensor, *, dtypes: tuple[torch.dtype, ...], problem: str | None = None) -> bool:
    """True when `x` lies on a CUDA device, has one of `dtypes`, and the op found no `problem` with the call.

    On CPU the answer is a quiet no: the reference is the CPU path. On a GPU a no is logged once with its reason.
    """
    if x.device.type != "cuda":
        return False
    if x.dtype not in dtypes:
        problem = f"dtype {x.dtype} is not one of {', '.join(map(str, dtypes))}"
    if problem is not None:
        note_fallback(op, problem)
        return False
    return True
