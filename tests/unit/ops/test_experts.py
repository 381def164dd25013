"""The experts reference against dense autograd, gradients in float64, row independence, and its argument checks."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k31core.ops.experts import DenseExperts, ExpertLora, ExpertShapeError, PackedExperts, expert_mlp
from k31core.ops.mxfp4 import decode

EXPERTS, LATENT, FFN, RANK = 5, 64, 32, 3
COUNTS = [3, 0, 9, 1, 8]


def packed_experts(seed: int, experts: int = EXPERTS, latent: int = LATENT, ffn: int = FFN) -> PackedExperts:
    generator = torch.Generator().manual_seed(seed)

    def one(rows: int, width: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(0, 256, (experts, rows, width // 2), dtype=torch.uint8, generator=generator)
        return packed, torch.randint(121, 126, (experts, rows, width // 32), dtype=torch.uint8, generator=generator)

    return PackedExperts(*one(ffn, latent), *one(ffn, latent), *one(latent, ffn))


def lora_factors(seed: int, dtype: torch.dtype = torch.float64, experts: int = EXPERTS) -> ExpertLora:
    generator = torch.Generator().manual_seed(seed)
    inner, outer = ((1, RANK, LATENT), (experts, FFN, RANK)), ((experts, RANK, FFN), (1, LATENT, RANK))
    shapes = (*inner, *inner, *outer)
    factors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return ExpertLora(*factors, scaling=0.25)


def rows(seed: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, LATENT, generator=generator, dtype=torch.float64).to(dtype)


def plain_torch(x: Tensor, counts: list[int], weights: PackedExperts, lora: ExpertLora | None) -> Tensor:
    """Row by row, merged weights, torch autograd: shares no code with the operator."""
    out = []
    expert_of_row = [e for e, n in enumerate(counts) for _ in range(n)]
    for row, e in zip(x, expert_of_row, strict=True):
        w1 = decode(weights.w1_packed[e], weights.w1_scale[e], torch.float64)
        w3 = decode(weights.w3_packed[e], weights.w3_scale[e], torch.float64)
        w2 = decode(weights.w2_packed[e], weights.w2_scale[e], torch.float64)
        if lora:
            w1 = w1 + lora.scaling * lora.w1_B[e].double() @ lora.w1_A[0].double()
            w3 = w3 + lora.scaling * lora.w3_B[e].double() @ lora.w3_A[0].double()
            w2 = w2 + lora.scaling * lora.w2_B[0].double() @ lora.w2_A[e].double()
        a, b = w1 @ row.double(), w3 @ row.double()
        out.append(w2 @ (4 * torch.tanh(a / 4) / (1 + torch.exp(-a)) * 25 * torch.tanh(b / 25)))
    return torch.stack(out)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("row_multiple", [1, 8])
def test_forward_and_gradients_equal_plain_autograd(with_lora: bool, row_multiple: int) -> None:
    weights, lora = packed_experts(0), lora_factors(1) if with_lora else None
    x = rows(2, sum(COUNTS)).requires_grad_()
    direction = rows(3, sum(COUNTS))
    leaves = [x, *(lora.factors() if lora else ())]
    y = expert_mlp(x, torch.tensor(COUNTS), weights, lora=lora, row_multiple=row_multiple)
    expected = plain_torch(x, COUNTS, weights, lora)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-10)
    grads = torch.autograd.grad((y * direction).sum(), leaves)
    for got, wanted in zip(grads, torch.autograd.grad((expected * direction).sum(), leaves), strict=True):
        assert float(wanted.abs().max()) > 0
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-9)


def test_gradcheck_in_float64() -> None:
    weights = packed_experts(4, experts=2, latent=32)
    counts = torch.tensor([2, 1])
    lora = lora_factors(5, experts=2)
    small = [f.detach()[..., :32].clone() if f.shape[-1] == LATENT else f.detach().clone() for f in lora.factors()]
    small[5] = small[5][:, :32].clone()
    leaves = [rows(6, 3)[:, :32].contiguous(), *small]

    def function(x: Tensor, *factors: Tensor) -> Tensor:
        return expert_mlp(x, counts, weights, lora=ExpertLora(*factors, scaling=0.5))

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in leaves], fast_mode=True)


def test_dense_experts_agree_and_get_gradients() -> None:
    packed, lora = packed_experts(7), lora_factors(8)
    dense = DenseExperts(
        *(
            decode(p, s, torch.float64).requires_grad_()
            for p, s in (
                (packed.w1_packed, packed.w1_scale),
                (packed.w3_packed, packed.w3_scale),
                (packed.w2_packed, packed.w2_scale),
            )
        )
    )
    x, counts = rows(9, sum(COUNTS)), torch.tensor(COUNTS)
    y = expert_mlp(x, counts, dense, lora=lora)
    torch.testing.assert_close(y, expert_mlp(x, counts, packed, lora=lora), rtol=1e-12, atol=1e-10)
    y.sum().backward()
    for weight in (dense.w1, dense.w3, dense.w2):
        used = weight.grad.abs().amax((1, 2)) > 0
        assert used.tolist() == [n > 0 for n in COUNTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_lora", [False, True])
def test_a_row_is_bit_equal_alone_and_in_any_batch(dtype: torch.dtype, with_lora: bool) -> None:
    weights = packed_experts(10)
    lora = lora_factors(11, dtype) if with_lora else None
    counts = [37, 1, 4, 0, 130]
    x = rows(12, sum(counts), dtype)
    together = expert_mlp(x, torch.tensor(counts), weights, lora=lora)
    start = 0
    for expert, n in enumerate(counts):
        for take in (1, 2, 3, 7, n):
            if not 0 < take <= n:
                continue
            alone = [0] * EXPERTS
            alone[expert] = take
            part = x[start + n - take : start + n]
            assert torch.equal(
                expert_mlp(part, torch.tensor(alone), weights, lora=lora), together[start + n - take : start + n]
            )
        start += n


def test_float32_and_bfloat16_are_close_to_float64() -> None:
    weights, lora = packed_experts(13), lora_factors(14, torch.float32)
    x = rows(15, sum(COUNTS), torch.float32)
    expected = plain_torch(x, COUNTS, weights, lora).detach()
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        y = expert_mlp(x.to(dtype), torch.tensor(COUNTS), weights, lora=lora)
        assert y.dtype == dtype
        assert float((y.detach().double() - expected).norm() / expected.norm()) < tolerance


def test_factor_gradients_keep_the_factors_dtype() -> None:
    lora = lora_factors(16, torch.float32)
    x = rows(17, sum(COUNTS), torch.bfloat16)
    expert_mlp(x, torch.tensor(COUNTS), packed_experts(18), lora=lora).float().sum().backward()
    assert all(f.grad.dtype == torch.float32 and bool(f.grad.isfinite().all()) for f in lora.factors())


def test_no_rows_at_all_gives_zero_gradients() -> None:
    lora = lora_factors(19)
    x = rows(20, 0).requires_grad_()
    y = expert_mlp(x, torch.zeros(EXPERTS, dtype=torch.int64), packed_experts(21), lora=lora)
    assert y.shape == (0, LATENT)
    y.sum().backward()
    assert all(float(f.grad.abs().max()) == 0 for f in lora.factors())


def test_nothing_dense_outlives_the_forward() -> None:
    """After the forward only bytes, rows and factors are alive: no floating tensor of an expert's size."""
    weights = packed_experts(22, experts=2, latent=512, ffn=256)
    x = torch.randn(4, 512, requires_grad=True)
    others = {id(t): t for t in gc.get_objects() if isinstance(t, Tensor)}  # held, so that no id is used again
    y = expert_mlp(x, torch.tensor([2, 2]), weights)
    gc.collect()
    alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and id(t) not in others]
    assert y.requires_grad and any(t is y for t in alive)
    assert not [tuple(t.shape) for t in alive if t.is_floating_point() and t.numel() >= 256 * 512]


def test_arguments_that_do_not_fit_are_named() -> None:
    weights, counts = packed_experts(23), torch.tensor(COUNTS)
    x = rows(24, sum(COUNTS))
    with pytest.raises(ExpertShapeError, match=r"x must be \[N, 64\]"):
        expert_mlp(x[:, :32], counts, weights)
    with pytest.raises(ExpertShapeError, match="add up to the 21 rows"):
        expert_mlp(x, counts + 1, weights)
    with pytest.raises(ExpertShapeError, match=r"int64 \[5\]"):
        expert_mlp(x, counts.int(), weights)
    lora = lora_factors(25)
    with pytest.raises(ExpertShapeError, match=r"lora\.w2_B must be \[1, 64, 3\]"):
        expert_mlp(x, counts, weights, lora=replace(lora, w2_B=lora.w2_B[:, :32]))
    with pytest.raises(ExpertShapeError, match="w3_scale must be"):
        replace(weights, w3_scale=weights.w3_scale[:, :, :1])
    with pytest.raises(ExpertShapeError, match="w2_packed must be contiguous"):
        replace(weights, w2_packed=weights.w2_packed.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="row_multiple"):
        expert_mlp(x, counts, weights, row_multiple=0)
