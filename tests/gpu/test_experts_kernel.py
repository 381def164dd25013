"""The fused experts on the card: exact decode in every product, values and gradients against float64, odd shapes."""

import pytest
import torch
from torch import Tensor

from k31core.ops.experts import ExpertLora, PackedExperts, expert_mlp
from k31core.ops.mxfp4 import decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

COUNTS = {
    "odd": [3, 0, 77, 1, 160, 161, 0, 305, 64, 65],
    "one expert": [0, 0, 0, 999, 0, 0, 0, 0, 0, 0],
    "single row": [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    "middle tiles": [81, 80, 79, 96, 64, 112, 113, 70, 60, 50],
}


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that whatever a kernel leaves unwritten shows."""
    blocks = [torch.full((64 << 20,), torch.nan, device="cuda") for _ in range(8)]
    del blocks


def packed_experts(experts: int, latent: int, ffn: int) -> PackedExperts:
    def one(rows: int, width: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(0, 256, (experts, rows, width // 2), dtype=torch.uint8, device="cuda")
        return packed, torch.randint(117, 121, (experts, rows, width // 32), dtype=torch.uint8, device="cuda")

    return PackedExperts(*one(ffn, latent), *one(ffn, latent), *one(latent, ffn))


def lora_factors(experts: int, latent: int, ffn: int, rank: int, dtype: torch.dtype) -> ExpertLora:
    inner, outer = ((1, rank, latent), (experts, ffn, rank)), ((experts, rank, ffn), (1, latent, rank))
    factors = [torch.randn(s, device="cuda", dtype=torch.float32) for s in (*inner, *inner, *outer)]
    scaled = [f.mul(f.shape[-1] ** -0.5).to(dtype).requires_grad_() for f in factors]
    return ExpertLora(*scaled, scaling=2.0)


def float64_experts(x: Tensor, counts: list[int], weights: PackedExperts, lora: ExpertLora | None) -> Tensor:
    """Merged dense experts in float64 with torch autograd."""
    out = []
    for e, rows in enumerate(x.split(counts)):
        w1 = decode(weights.w1_packed[e], weights.w1_scale[e], torch.float64)
        w3 = decode(weights.w3_packed[e], weights.w3_scale[e], torch.float64)
        w2 = decode(weights.w2_packed[e], weights.w2_scale[e], torch.float64)
        if lora:
            w1 = w1 + lora.scaling * lora.w1_B[e].double() @ lora.w1_A[0].double()
            w3 = w3 + lora.scaling * lora.w3_B[e].double() @ lora.w3_A[0].double()
            w2 = w2 + lora.scaling * lora.w2_B[0].double() @ lora.w2_A[e].double()
        a, b = rows @ w1.t(), rows @ w3.t()
        out.append((4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)) @ w2.t())
    return torch.cat(out)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rank", [None, 32, 5])
@pytest.mark.parametrize("name", list(COUNTS))
@pytest.mark.parametrize(("latent", "ffn"), [(512, 1024), (1024, 512)])
def test_values_and_gradients(name: str, rank: int | None, latent: int, ffn: int) -> None:
    counts, experts = COUNTS[name], len(COUNTS[name])
    weights = packed_experts(experts, latent, ffn)
    lora = lora_factors(experts, latent, ffn, rank, torch.float32) if rank else None
    x = torch.randn(sum(counts), latent, device="cuda", dtype=torch.bfloat16).requires_grad_()
    direction = torch.randn_like(x)
    leaves = [x, *(lora.factors() if lora else ())]
    poison()
    y = expert_mlp(x, torch.tensor(counts, device="cuda"), weights, lora=lora)
    grads = torch.autograd.grad(y, leaves, direction)
    with torch.no_grad():
        inference = expert_mlp(x, torch.tensor(counts, device="cuda"), weights, lora=lora)
    assert torch.equal(inference, y)
    expected = float64_experts(x.double(), counts, weights, lora)
    wanted = torch.autograd.grad(expected, leaves, direction.double())
    assert relative_error(y, expected) < 1.5e-2
    for got, want in zip(grads, wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert relative_error(got, want) < 1.5e-2
        if got.ndim == 3 and got.shape[0] == experts:
            assert all(float(got[e].abs().max()) == 0 for e, n in enumerate(counts) if n == 0)


def every_byte_and_scale() -> tuple[Tensor, Tensor, Tensor]:
    """(packed `[1, 512, 256]`, scale `[1, 512, 16]`, float64 `[512, 512]`): row i has every byte under scale i mod 255.

    Codes that overflow bfloat16 under scales 253 and 254 are replaced by zero, as the reference refuses them.
    """
    packed = torch.arange(256, dtype=torch.uint8).expand(512, 256).clone()
    scale = (torch.arange(512) % 255).to(torch.uint8).unsqueeze(1).expand(512, 16).contiguous()
    too_big = decode(packed, scale, torch.float64).abs() >= 2.0**128
    packed[too_big.view(512, 256, 2).any(-1)] = 0
    return packed[None].cuda(), scale[None].cuda(), decode(packed, scale, torch.float64)


def one_hot_products(packed: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Every product of the kernel with one-hot rows: the weight itself, `[512, 512]` as stored."""
    from k31core.ops.experts import kernel_launch
    from k31core.ops.experts.kernel_launch import Groups

    weights = PackedExperts(packed, scale, packed, scale, packed, scale)
    eye = torch.eye(512, device="cuda", dtype=torch.bfloat16)
    zeros = torch.zeros_like(eye)
    groups = Groups.of(eye, torch.tensor([512], device="cuda"), weights, 25.0)
    h, y, pre = torch.empty_like(eye), torch.empty_like(eye), eye.new_empty(512, 1024)
    kernel_launch.gate(groups, eye, None, h, pre)
    kernel_launch.down(groups, eye, None, y)
    dx1, dx3 = torch.empty_like(eye), torch.empty_like(eye)
    kernel_launch.gate_backward(groups, torch.cat([eye, zeros], 1), None, dx1)
    kernel_launch.gate_backward(groups, torch.cat([zeros, eye], 1), None, dx3)
    return {"w1": pre[:, :512].t(), "w3": pre[:, 512:].t(), "w2": y.t(), "w1 transposed": dx1, "w3 transposed": dx3}


def test_every_byte_and_scale_is_decoded_exactly() -> None:
    packed, scale, expected = every_byte_and_scale()
    poison()
    for name, got in one_hot_products(packed, scale).items():
        different = (got.cpu().double() != expected).nonzero()
        assert not len(different), f"{name}: {len(different)} values differ, first at {different[0].tolist()}"


def test_a_row_does_not_depend_on_its_batch() -> None:
    counts = [300, 20, 0, 5, 9, 1, 1, 1, 1, 1]
    weights = packed_experts(10, 512, 512)
    x = torch.randn(sum(counts), 512, device="cuda", dtype=torch.bfloat16)
    together = expert_mlp(x, torch.tensor(counts, device="cuda"), weights)
    alone = torch.tensor([7, *[0] * 9], device="cuda")
    assert torch.equal(expert_mlp(x[100:107].contiguous(), alone, weights), together[100:107])


def test_repeated_runs_are_bit_equal() -> None:
    counts = torch.tensor(COUNTS["odd"], device="cuda")
    weights = packed_experts(10, 1024, 512)
    x = torch.randn(int(counts.sum()), 1024, device="cuda", dtype=torch.bfloat16)
    first = expert_mlp(x, counts, weights)
    assert all(torch.equal(expert_mlp(x, counts, weights), first) for _ in range(20))
