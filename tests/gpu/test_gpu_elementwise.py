"""SiTU, AttnRes and the KDA step on a GPU against fp64, at real widths and odd ones, over poisoned memory."""

import pytest
import torch

from k31core.ops.attn_res import attn_res_mix
from k31core.ops.attn_res import reference as attn_res_reference
from k31core.ops.kda import kda_step
from k31core.ops.kda import reference as kda_reference
from k31core.ops.situ import reference as situ_reference
from k31core.ops.situ import situ_glu

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 3e-6}


def poison():
    """Fill the allocator's free blocks with NaN, so that an element nobody writes shows."""
    blocks = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del blocks


def near(ours, expected, tolerance):
    for one, other in zip(ours, expected):
        assert torch.isfinite(one).all()
        assert (one.double() - other.double()).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 33), (1000, 6144), (3, 33792), (2, 5, 96), (0, 64)])
@pytest.mark.parametrize("halves", [False, True])
def test_situ(dtype, shape, halves):
    torch.manual_seed(0)
    wide = (torch.randn(*shape[:-1], 2 * shape[-1], device="cuda") * 10).to(dtype)
    gate, up = wide.chunk(2, -1) if halves else (part.contiguous() for part in wide.chunk(2, -1))
    low = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    high = [x.detach().double().requires_grad_() for x in low]
    weight = torch.randn(shape, device="cuda").to(dtype)
    poison()
    out = situ_glu(*low, beta=4.0, linear_beta=25.0)
    exact = situ_reference.situ_glu(*high, beta=4.0, linear_beta=25.0)
    grads = torch.autograd.grad((out * weight).sum(), low)
    assert out.dtype == dtype
    near((out, *grads), (exact, *torch.autograd.grad((exact * weight.double()).sum(), high)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("snapshots", "tokens", "hidden"), [(0, 3, 64), (1, 5, 100), (3, 257, 7168), (8, 64, 7168)])
def test_attn_res(dtype, snapshots, tokens, hidden):
    torch.manual_seed(0)
    low = [torch.randn(tokens, hidden, device="cuda").to(dtype).requires_grad_() for _ in range(snapshots + 1)]
    high = [x.detach().double().requires_grad_() for x in low]
    norm, proj = torch.randn(hidden, device="cuda") + 1, torch.randn(1, hidden, device="cuda") * 3 / hidden**0.5
    weight = torch.randn(tokens, hidden, device="cuda").to(dtype)
    poison()
    out = attn_res_mix(low[:-1], low[-1], norm, proj, 1e-5)
    exact = attn_res_reference.attn_res_mix(high[:-1], high[-1], norm.double(), proj.double(), 1e-5)
    grads = torch.autograd.grad((out * weight).sum(), low)
    expected = torch.autograd.grad((exact * weight.double()).sum(), high)
    near((out, *grads), (exact, *expected), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("values", [128, 40])
def test_kda_step_and_its_bits_in_any_batch(values):
    torch.manual_seed(0)
    q, k, g = (torch.randn(9, 3, 128, device="cuda") for _ in range(3))
    v, state = torch.randn(9, 3, values, device="cuda"), torch.randn(9, 3, 128, values, device="cuda")
    arguments = (q / 11, k / 11, v, -g.abs(), torch.rand(9, 3, device="cuda"), state)
    poison()
    full = kda_step(*arguments)
    near(full, kda_reference.kda_step(*(x.double() for x in arguments)), 1e-6)
    part = kda_step(*(x[3:5] for x in arguments))
    assert torch.equal(part[0], full[0][3:5]) and torch.equal(part[1], full[1][3:5])
