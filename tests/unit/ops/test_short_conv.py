"""The causal convolution against loops; resets at sequence bounds; prefill, pieces and steps agree to the bit."""

import math

import pytest
import torch

from k31core.ops.short_conv import causal_conv, causal_conv_state, causal_conv_step

LENGTHS = [[1], [5], [1, 2, 3, 4, 9], [3, 0, 1, 7]]


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def by_loops(x, weight, cu_seqlens):
    taps = weight.shape[-1]
    out = torch.zeros_like(x)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        for t in range(start, end):
            for c in range(x.shape[1]):
                total = 0.0
                for back in range(taps):
                    if t - back >= start:
                        total += float(x[t - back, c]) * float(weight[c, 0, taps - 1 - back])
                out[t, c] = total / (1 + math.exp(-total))
    return out


@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_loops(lengths):
    cu = bounds(lengths)
    x, weight = torch.randn(sum(lengths), 3, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64)
    torch.testing.assert_close(causal_conv(x, weight, cu), by_loops(x, weight, cu), rtol=1e-12, atol=1e-14)


def test_gradient():
    cu = bounds([4, 1, 3])
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    state = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: causal_conv(a[0], a[1], cu, a[2]), (x, weight, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [64, 5])
def test_packed_alone_in_pieces_and_stepped_are_the_same_bits(dtype, channels):
    lengths = [7, 1, 2, 6]
    cu = bounds(lengths)
    x, weight = torch.randn(sum(lengths), channels).to(dtype), torch.randn(channels, 1, 4)
    packed, final = causal_conv(x, weight, cu), causal_conv_state(x, cu, 4)
    for s, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist())):
        alone = causal_conv(x[start:end], weight, bounds([end - start]))
        assert torch.equal(alone, packed[start:end])
        state = torch.zeros(1, channels, 3, dtype=dtype)
        for t in range(start, end):
            y, state = causal_conv_step(x[t : t + 1], state, weight)
            assert torch.equal(y[0], packed[t])
        assert torch.equal(state[0], final[s])
    first = causal_conv_state(x[:3], bounds([3]), 4)
    rest = causal_conv(x[3:7], weight, bounds([4]), first)
    assert torch.equal(rest, packed[3:7])
    second = causal_conv_state(x[3:5], bounds([2]), 4, first)
    assert torch.equal(causal_conv(x[5:7], weight, bounds([2]), second), packed[5:7])


def test_step_bits_do_not_depend_on_the_batch():
    x, state, weight = torch.randn(9, 6), torch.randn(9, 6, 3), torch.randn(6, 1, 4)
    full, new = causal_conv_step(x, state, weight)
    for count in (1, 2, 5):
        part, part_new = causal_conv_step(x[:count], state[:count], weight)
        assert torch.equal(part, full[:count]) and torch.equal(part_new, new[:count])
