"""SiTU-GLU against math.tanh, its gradient, and its bits in any tensor size."""

import math

import pytest
import torch

from k31core.ops.rowstable import sigmoid, silu
from k31core.ops.situ import situ_glu


def test_equals_the_formula_over_the_whole_range():
    gate = torch.cat([torch.linspace(-120, 120, 97), torch.randn(20)]).double()
    up = torch.cat([torch.linspace(400, -400, 97), torch.randn(20)]).double()
    expected = [
        4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(b / 25) for a, b in zip(gate.tolist(), up.tolist())
    ]
    out = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)


def test_computes_in_fp32_for_bf16_input():
    gate, up = torch.randn(8, 32).bfloat16() * 5, torch.randn(8, 32).bfloat16() * 20
    out = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    exact = situ_glu(gate.double(), up.double(), beta=4.0, linear_beta=25.0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-30)


def test_gradient():
    gate = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    up = (10 * torch.randn(3, 7, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: situ_glu(a, b, beta=4.0, linear_beta=25.0), (gate, up))


@pytest.mark.parametrize("function", [sigmoid, silu])
@pytest.mark.parametrize("width", [1, 2, 5, 33, 64])
def test_sigmoid_bits_do_not_depend_on_the_rows_beside(function, width):
    x = torch.randn(37, width) * 3
    full = function(x)
    for count in (1, 2, 7, 31):
        assert torch.equal(function(x[:count]), full[:count])
        assert torch.equal(function(x[-count:]), full[-count:])
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=0)


def test_situ_bits_do_not_depend_on_the_rows_beside():
    gate, up = torch.randn(11, 5), torch.randn(11, 5)
    full = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    assert torch.equal(situ_glu(gate[3:4], up[3:4], beta=4.0, linear_beta=25.0), full[3:4])
