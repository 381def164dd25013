"""Digest of one tensor where it lives: numpy on the CPU, one Triton kernel on the GPU; equal to the bit."""

import torch
from torch import Tensor

from k31core.ops.digest.value import Digest, digest_of_bytes


def byte_view(tensor: Tensor, name: str = "tensor") -> Tensor:
    """The tensor's bytes, uint8 `[n]`, without a copy. Raises ValueError when it is not contiguous or not aligned."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}: call .contiguous() first")
    if tensor.data_ptr() % 8:
        raise ValueError(f"{name} must begin at a multiple of 8 bytes: call .clone() first")
    return tensor.detach().reshape(-1).view(torch.uint8)


def digest_of_tensor(tensor: Tensor, first_byte: int = 0) -> Digest:
    """Digest of a contiguous tensor, or of a shard that begins at byte `first_byte` (a multiple of 8) of its tensor."""
    data = byte_view(tensor)
    if not tensor.is_cuda:
        return digest_of_bytes(memoryview(data.numpy()), first_byte)
    from k31core.ops.digest.kernel import copy_and_digest, plan_copies

    if first_byte % 8:
        raise ValueError(f"a shard must begin at a multiple of 8 bytes, got {first_byte}")
    sums = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    copy_and_digest(plan_copies([(data.data_ptr(), 0, data.numel(), first_byte)], tensor.device), None, sums)
    return digests_of_sums(sums, [data.numel()])[0]


def digests_of_sums(sums: Tensor, sizes: list[int]) -> list[Digest]:
    """Digests from the kernel's int64 sums `[n, 2]` (low, high) and each tensor's bytes; waits for the device."""
    mask = (1 << 64) - 1
    return [Digest(low & mask, high & mask, size) for (low, high), size in zip(sums.tolist(), sizes, strict=True)]
