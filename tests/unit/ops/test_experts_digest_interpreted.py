"""The Triton kernels of experts (LoRA side) and digest in Triton's interpreter on the CPU, against plain torch."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import torch
import k31core.ops.digest, k31core.ops.experts
assert "triton" not in sys.modules, "importing the operators must not import triton"

from k31core.ops.digest.kernel import PIECE_WORDS, copy_and_digest, plan_copies
from k31core.ops.digest.tensor import digest_of_tensor, digests_of_sums
from k31core.ops.experts.kernel_lora import outer, padded, project


def check_digest():
    sizes = [1, 8, 13, 8 * PIECE_WORDS, 8 * PIECE_WORDS + 24, 16 * PIECE_WORDS + 5]
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    offsets = [sum((s + 15) // 16 * 16 for s in sizes[:i]) for i in range(len(sizes))]

    def plan(group):
        entries = [(t.data_ptr(), o, t.numel(), 0) for t, o in zip(group, offsets)]
        return plan_copies(entries, torch.device("cpu"))

    expected = [digest_of_tensor(t) for t in tensors]
    bucket = torch.full((offsets[-1] + sizes[-1],), 255, dtype=torch.uint8)
    sums = torch.zeros(len(sizes), 2, dtype=torch.int64)
    copy_and_digest(plan(tensors), bucket, sums)
    assert digests_of_sums(sums, sizes) == expected
    assert all(torch.equal(bucket[o : o + t.numel()], t) for t, o in zip(tensors, offsets))
    back = [torch.zeros_like(t) for t in tensors]
    copy_and_digest(plan(back), bucket, sums.zero_(), out=True)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors))
    assert digests_of_sums(sums, sizes) == expected
    copy_and_digest(plan(tensors), None, sums.zero_())
    assert digests_of_sums(sums, sizes) == expected


def check_lora():
    counts, width, rank = [5, 0, 70, 1], 200, 5
    rows = sum(counts)
    of_row = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    x = torch.randn(rows, 2 * width)[:, width:]  # a column range of wider rows
    weight = torch.randn(4, rank, width).transpose(1, 2)
    out = torch.full((rows, 64), torch.nan)
    project(x, weight, torch.tensor(counts), 0.5, out[:, 32:])
    expected = 0.5 * torch.einsum("nk,nkr->nr", x, weight[of_row])
    torch.testing.assert_close(out[:, 32 : 32 + rank], expected, rtol=1e-4, atol=1e-4)
    assert bool((out[:, 32 + rank :] == 0).all()) and bool(out[:, :32].isnan().all())
    u = torch.randn(rows, 64)
    grad = torch.full((4, rank, width), torch.nan)
    outer(x, u[:, 32:], torch.tensor(counts), grad.transpose(1, 2))
    for e in range(4):
        mine = of_row == e
        torch.testing.assert_close(grad[e], u[mine, 32 : 32 + rank].t() @ x[mine], rtol=1e-4, atol=1e-4)
    wide = padded(torch.ones(2, 3, 5), 4, 32)
    assert wide.shape == (2, 4, 32) and wide.dtype == torch.bfloat16 and float(wide.sum()) == 30


torch.manual_seed(0)
check_digest()
check_lora()
print("equal")
"""


def test_kernels_equal_their_references_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
