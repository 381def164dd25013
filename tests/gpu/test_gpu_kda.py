"""KDA through fla on a GPU against our own token loop and chunked form, at 24 heads x 128 and packed sequences."""

import pytest
import torch

from k31core.ops.kda import chunk as torch_chunk
from k31core.ops.kda import kda_chunk, kda_gate, kda_gated, kda_recurrent, l2norm

pytestmark = pytest.mark.gpu
pytest.importorskip("fla", reason="fla-core is not installed")


def relative(ours, expected):
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


def raw(lengths, heads=24):
    torch.manual_seed(0)
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, heads, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    f = (torch.randn(tokens, heads, 128, device="cuda") * 2).bfloat16().requires_grad_()
    logits = torch.randn(tokens, heads, device="cuda").bfloat16().requires_grad_()
    A_log, bias = torch.randn(heads, device="cuda") * 0.5, torch.randn(heads * 128, device="cuda")
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return (q, k, v, f, logits), A_log, bias, cu


@pytest.mark.parametrize("lengths", [[640], [1, 63, 64, 65, 200, 7]])
@pytest.mark.parametrize("fused", [False, True])
def test_values_states_and_gradients(lengths, fused):
    leaves, A_log, bias, cu = raw(lengths)
    state = torch.randn(len(lengths), 24, 128, 128, device="cuda") * 0.1

    def ours(q, k, v, f, logits):
        if fused:
            return kda_gated(q, k, v, f, logits, A_log, bias, lower_bound=-5.0, cu_seqlens=cu, initial_state=state)
        g = kda_gate(f, A_log, bias, -5.0)
        return kda_chunk(l2norm(q), l2norm(k), v, g, logits.float().sigmoid(), cu, state)

    def exact(q, k, v, f, logits):
        g = kda_gate(f, A_log.double(), bias.double(), -5.0)
        return torch_chunk.kda_chunk(l2norm(q), l2norm(k), v, g, logits.sigmoid(), cu, state.double())

    high = [x.detach().double().requires_grad_() for x in leaves]
    o, final = ours(*leaves)
    expected, expected_final = exact(*high)
    weight = torch.randn(o.shape, device="cuda").bfloat16()
    grads = torch.autograd.grad(o, leaves, weight)
    expected_grads = torch.autograd.grad(expected, high, weight.double())
    errors = {"o": relative(o, expected), "state": relative(final, expected_final)}
    for name, one, other in zip(("q", "k", "v", "f", "beta"), grads, expected_grads):
        errors[f"d{name}"] = relative(one, other)
    print(lengths, "fused" if fused else "plain", {k: f"{v:.1e}" for k, v in errors.items()})
    assert max(errors.values()) < 2e-2 and errors["o"] < 1e-2 and errors["state"] < 1e-2


def test_token_loop_agrees_with_the_chunked_reference():
    leaves, A_log, bias, cu = raw([50, 3], heads=2)
    q, k, v, f, logits = (x.detach().double() for x in leaves)
    arguments = (l2norm(q), l2norm(k), v, kda_gate(f, A_log.double(), bias.double(), -5.0), logits.sigmoid(), cu)
    for ours, expected in zip(torch_chunk.kda_chunk(*arguments), kda_recurrent(*arguments)):
        torch.testing.assert_close(ours, expected)
