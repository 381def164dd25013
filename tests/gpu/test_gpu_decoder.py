"""The whole decoder on a GPU: known answers in fp32, and BF16 with the kernels no worse than BF16 without them.

`pytest -m gpu tests/gpu/test_gpu_decoder.py`: about a minute, half of it on the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31core.checkpoint.adapter import AdapterConfig, load_adapter, write_adapter
from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.lora import trainable_slots
from k31core.model.weight_names import adapter_slots, base_slots
from tests.model_cases import CASES, config_of, random_adapter, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("bounded", "few_candidates"),
]
CUDA = torch.device("cuda")


def decoder_of(directory: Path, adapter: Path, build: Build) -> Decoder:
    decoder = Decoder(load_config(directory), build)
    NativeCheckpoint(directory).load(base_slots(decoder), progress=False)
    load_adapter(adapter, adapter_slots(decoder))
    return decoder


def test_known_answers_in_fp32() -> None:
    expected = load_file(CASES / "tiny-k31-expected.safetensors")
    build = Build(device=CUDA, lora=LoraSpec(4, 8.0))
    decoder = decoder_of(CASES / "tiny-k31", CASES / "tiny-k31-adapter", build)
    tokens = expected["tokens"].to(CUDA)
    with torch.no_grad():
        logits = decoder.logits(decoder(Packed(tokens, torch.tensor([0, len(tokens)], device=CUDA))))
    assert torch.allclose(logits.cpu(), expected["logits_lora"], rtol=0, atol=5e-4)


def test_bf16_kernels_with_published_widths(tmp_path: Path, say: Callable[..., None]) -> None:
    """Errors against fp64 of logits and of every adapter gradient, beside those of BF16 through the CPU reference."""
    raw = config_of(
        layers=4,
        mla=(3,),
        hidden_size=512,
        num_attention_heads=4,
        kda_heads=4,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        routed_expert_hidden_size=512,
        moe_intermediate_size=512,
        num_experts=16,
        index_topk=1 << 12,
    )
    raw["text_config"]["linear_attn_config"]["head_dim"] = 128
    write_checkpoint(tmp_path / "model", raw, shard_bytes=1 << 30)
    write_adapter(tmp_path / "adapter", AdapterConfig(16, 32.0, None), random_adapter(raw, 16))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 96, (384,), generator=generator)
    bounds = torch.tensor([0, 150, 384])
    pull = torch.randn(384, 96, generator=generator)

    def run(device: torch.device, dtype: torch.dtype, routing: torch.Tensor | None) -> tuple:
        build = Build(device=device, dtype=dtype, lora=LoraSpec(16, 32.0), recompute=True)
        decoder = decoder_of(tmp_path / "model", tmp_path / "adapter", build)
        batch = Packed(tokens.to(device), bounds.to(device))
        if routing is None:
            with torch.no_grad():
                _, routing = decoder.forward_captured(batch)
        say(device.type, dtype, "loaded, experts chosen")
        logits = decoder.logits(decoder(replace(batch, routing=routing.to(device))))
        say("forward", float(logits.detach().double().norm()))
        (logits * pull.to(device)).sum().backward()
        gradients = {slot.name: slot.tensor.grad.double().cpu() for slot in trainable_slots(decoder)}
        say("backward")
        return logits.detach().double().cpu(), gradients, routing.cpu()

    exact, exact_gradients, routing = run(torch.device("cpu"), torch.float64, None)
    plain, plain_gradients, _ = run(torch.device("cpu"), torch.bfloat16, routing)
    fast, fast_gradients, _ = run(CUDA, torch.bfloat16, routing)

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got - want).norm() / want.norm())

    say("logits, error without and with kernels:", error(plain, exact), error(fast, exact))
    assert error(fast, exact) < 1.5 * error(plain, exact)
    worse = []
    for name, want in exact_gradients.items():
        reference, kernel = error(plain_gradients[name], want), error(fast_gradients[name], want)
        if kernel > 1.5 * reference + 0.02:
            worse.append((name, reference, kernel))
    say("gradients", len(exact_gradients), "worse", len(worse), worse[:5])
    assert not worse, worse[:5]
