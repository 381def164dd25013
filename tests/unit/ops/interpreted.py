"""Runs our Triton kernels in Triton's interpreter, on CPU tensors, against the references: started by
test_interpreted.py.

Run with TRITON_INTERPRET=1 (it must be set before a kernel is imported). fp32 throughout: the interpreter cannot
multiply bf16.
"""

import sys
import traceback

import torch

from k31core.ops.attn_res import kernel as attn_res_kernel
from k31core.ops.attn_res import reference as attn_res_reference
from k31core.ops.dsa import kernel_attention, kernel_select, latent
from k31core.ops.dsa import reference as dsa_reference
from k31core.ops.kda import kernel as kda_kernel
from k31core.ops.kda import reference as kda_reference
from k31core.ops.logprobs import kernel as logprobs_kernel
from k31core.ops.logprobs import kernel_topk
from k31core.ops.logprobs import reference as logprobs_reference
from k31core.ops.situ import kernel as situ_kernel
from k31core.ops.situ import reference as situ_reference


def near(ours, expected, tolerance=1e-5):
    for one, other in zip(ours, expected):
        assert torch.isfinite(one).all() and (one.double() - other.double()).norm() <= tolerance * other.norm() + 1e-12


def leaves(*shapes):
    low = [torch.randn(*shape).requires_grad_() for shape in shapes]
    return low, [x.detach().double().requires_grad_() for x in low]


def both(function, reference, low, high):
    """Values and gradients of the two with one random output weight."""
    ours, expected = function(*low), reference(*high)
    weight = torch.randn(expected.shape)
    grads = torch.autograd.grad((ours * weight).sum(), low)
    near((ours, *grads), (expected, *torch.autograd.grad((expected * weight).sum(), high)))


def check_situ():
    low, high = leaves((5, 140))
    both(
        lambda x: situ_kernel.situ_glu(*(30 * x).chunk(2, -1), 4.0, 25.0),
        lambda x: situ_reference.situ_glu(*(30 * x).chunk(2, -1), beta=4.0, linear_beta=25.0),
        low,
        high,
    )
    x = torch.logspace(-8, 2, 64)[None]
    exact = situ_reference.situ_glu(x.double(), x.double(), beta=4.0, linear_beta=25.0)
    assert ((situ_kernel.situ_glu(x, x, 4.0, 25.0) - exact).abs() / exact.abs()).max() < 2e-6


def check_attn_res():
    norm, proj = torch.randn(40) + 1, torch.randn(1, 40)
    for snapshots in (0, 1, 8):
        low, high = leaves(*[(3, 40)] * (snapshots + 1))
        both(
            lambda *rows: attn_res_kernel.attn_res_mix(rows[:-1], rows[-1], norm, proj, 1e-5),
            lambda *rows: attn_res_reference.attn_res_mix(rows[:-1], rows[-1], norm.double(), proj.double(), 1e-5),
            low,
            high,
        )


def check_logprobs():
    logprobs_kernel.TOKENS, logprobs_kernel.WORDS = 4, 16
    head = torch.randn(50, 8)
    for temperature, valid in ((1.0, 50), (0.7, 37)):
        ids = torch.stack([torch.randperm(valid)[:5] for _ in range(6)])
        ids[:, 0] = ids[:, 2]  # a word twice in one token's list
        ids[1, 1] = -1
        options = {"temperature": temperature, "vocab_start": 0, "valid_vocab": valid}
        low, high = leaves((6, 8))
        both(
            lambda x, i=ids, o=options: torch.where(i >= 0, logprobs_kernel.chosen_logprobs(x, head, i, **o), 0.0),
            lambda x, i=ids, o=options: torch.where(
                i >= 0, logprobs_reference.chosen_logprobs(x, head.double(), i, **o), 0.0
            ),
            low,
            high,
        )


def check_topk():
    kernel_topk.TILE, kernel_topk.GROUP = 64, 8
    logits = torch.randint(-3, 4, (3, 130)).float() / 2
    logits[0, 5], logits[1], logits[2, :120] = -0.0, 0.0, float("-inf")
    for k in (5,):
        ids, logps = kernel_topk.topk_logprobs(logits, k)
        expected, expected_logps = logprobs_reference.topk_logprobs(logits, k)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(logps, expected_logps)


def check_selection():
    kernel_select.TILE_Q = kernel_select.TILE_K = 16
    kernel_select.WORKSPACE = 600
    for lengths, rows in (([6, 1, 0, 20, 33], None), ([45], [3, 10, 20, 44])):
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        tokens = sum(lengths)
        q, k, w = (torch.randint(-2, 3, shape).float() for shape in ((tokens, 2, 16), (tokens, 16), (tokens, 2)))
        at = torch.arange(tokens) if rows is None else torch.tensor(rows)
        options = {"cu_seqlens": cu, "topk": 7, "rows": None if rows is None else at}
        expected = dsa_reference.select_keys(q[at], k, w[at], **options)
        for registers in (16384, 16):  # whole rows in registers; rows read again in each pass
            kernel_select.IN_REGISTERS = registers
            assert torch.equal(kernel_select.select_keys(q[at], k, w[at], **options), expected)


def check_sparse_attention():
    kernel_attention.KEYS_FORWARD = kernel_attention.KEYS_BACKWARD = 16
    kernel_attention.HEADS = 4
    cu = torch.tensor([0, 7, 20])
    indices = dsa_reference.select_topk(torch.randn(20, 20), 10, *dsa_reference.causal_ranges(cu))
    indices[3] = -1
    low, high = leaves((20, 5, 48), (20, 48))
    both(
        lambda q, kv: kernel_attention.sparse_latent_attention(q, kv, indices, scale=0.2, value_width=32),
        lambda q, kv: latent.sparse_latent_attention(q, kv, indices, scale=0.2, value_width=32),
        low,
        high,
    )


def check_kda_step():
    arguments = [torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 40), -torch.rand(3, 2, 16)]
    arguments += [torch.rand(3, 2), torch.randn(3, 2, 16, 40)]
    near(kda_kernel.kda_step(*arguments), kda_reference.kda_step(*(x.double() for x in arguments)))


if __name__ == "__main__":
    failed = []
    for check in sys.argv[1:]:
        torch.manual_seed(0)
        try:
            globals()[f"check_{check}"]()
        except Exception:  # every check's outcome is wanted, and its traceback
            failed.append(check)
            print(f"--- {check}", file=sys.stderr)
            traceback.print_exc()
    print(" ".join(failed))
