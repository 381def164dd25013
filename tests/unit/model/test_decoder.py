"""The decoder against known answers and against an independent float64 model, forward and adapter gradients."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k31core.checkpoint.adapter import AdapterConfig, load_adapter, write_adapter
from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.lora import adapter_parameters, trainable_slots
from k31core.model.mla import MlaAttention
from k31core.model.weight_names import IGNORED_PREFIXES, adapter_slots, base_slots, expected_names
from k31core.ops.dsa import sparse_mla_attention
from tests.model_cases import CASES, ReferenceModel, config_of, load_tensors, random_adapter, write_checkpoint

VARIANTS = {
    "k31-shared-block-2": config_of(layers=5, mla=(2, 5), attn_res_block_size=2),
    "k31-4-heads-topk-3": config_of(layers=4, mla=(3, 4), num_attention_heads=4, kda_heads=3, index_topk=3),
    "k3": config_of(layers=5, mla=(4, 5), k31=False, num_attention_heads=3),
    "k3-two-dense": config_of(layers=4, mla=(1,), k31=False, first_k_dense_replace=2, num_experts_per_token=1),
}


def decoder_of(directory: Path, build: Build, adapter: Path | None = None) -> Decoder:
    decoder = Decoder(load_config(directory), build)
    checkpoint = NativeCheckpoint(directory)
    checkpoint.check_names(expected_names(decoder.config), IGNORED_PREFIXES)
    checkpoint.load(base_slots(decoder))
    if adapter is not None:
        load_adapter(adapter, adapter_slots(decoder))
    return decoder


def packed(*sequences: torch.Tensor) -> Packed:
    ends = torch.tensor([0, *[len(s) for s in sequences]]).cumsum(0)
    return Packed(torch.cat(sequences), ends)


@pytest.mark.parametrize(("adapter", "key"), [(None, "logits"), (CASES / "tiny-k31-adapter", "logits_lora")])
def test_known_answers_in_fp32(adapter: Path | None, key: str) -> None:
    expected = load_file(CASES / "tiny-k31-expected.safetensors")
    lora = None if adapter is None else LoraSpec(rank=4, alpha=8)
    decoder = decoder_of(CASES / "tiny-k31", Build(lora=lora), adapter)
    with torch.no_grad():
        logits = decoder.logits(decoder(packed(expected["tokens"])))
    assert torch.allclose(logits, expected[key], rtol=0, atol=1e-4)
    assert not torch.allclose(logits, expected["logits" if key == "logits_lora" else "logits_lora"], atol=1e-2)


@pytest.mark.parametrize("name", VARIANTS)
def test_equal_to_an_independent_model_with_gradients(name: str, tmp_path: Path) -> None:
    raw = VARIANTS[name]
    directory = write_checkpoint(tmp_path / "model", raw)
    factors = random_adapter(raw, rank=3)
    write_adapter(tmp_path / "adapter", AdapterConfig(3, 6.0, None), factors)
    decoder = decoder_of(directory, Build(dtype=torch.float64, lora=LoraSpec(3, 6.0)), tmp_path / "adapter")
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, decoder.config.vocab_size, (n,), generator=generator) for n in (1, 13, 20)]

    leaves = {k: v.double().requires_grad_() for k, v in factors.items()}
    reference = ReferenceModel(raw, load_tensors(directory), leaves, scaling=2.0)
    expected = torch.cat([reference.logits(s) for s in sequences])
    logits = decoder.logits(decoder(packed(*sequences)))
    assert torch.allclose(logits, expected, rtol=0, atol=1e-9)

    mix = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * mix).sum().backward()
    (logits * mix).sum().backward()
    for slot in trainable_slots(decoder):
        want = leaves[slot.name].grad
        assert want is not None and slot.tensor.grad is not None, slot.name
        assert torch.allclose(slot.tensor.grad, want, rtol=1e-7, atol=1e-8 * float(want.abs().max())), slot.name
    assert len(trainable_slots(decoder)) == len(leaves)


def test_packing_replay_and_recompute_change_nothing(tmp_path: Path) -> None:
    raw = VARIANTS["k31-shared-block-2"]
    directory = write_checkpoint(tmp_path / "model", raw)
    build = Build(dtype=torch.float64, lora=LoraSpec(2, 4.0, seed=5))
    decoder = decoder_of(directory, build)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(decoder):
        parameter.data.normal_(0, 0.3, generator=generator)
    sequences = [torch.randint(0, 96, (n,), generator=generator) for n in (7, 18, 2)]
    batch = packed(*sequences)

    def run(batch: Packed, recompute: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        decoder.build = replace(build, recompute=recompute)
        decoder.zero_grad()
        hidden = decoder(batch)
        hidden.square().sum().backward()
        return hidden.detach(), [p.grad.clone() for p in adapter_parameters(decoder)]

    hidden, grads = run(batch, recompute=False)
    hidden_again, grads_again = run(batch, recompute=True)
    assert torch.equal(hidden, hidden_again)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert all(g.abs().max() > 0 for g in grads)

    with torch.no_grad():
        _, routing = decoder.forward_captured(batch)
    replayed, replay_grads = run(Packed(batch.tokens, batch.cu_seqlens, routing), recompute=True)
    assert torch.equal(hidden, replayed)
    assert all(torch.equal(a, b) for a, b in zip(grads, replay_grads, strict=True))
    forced = routing.clone()
    forced[:, 1:] = (forced[:, 1:] + 1) % decoder.config.num_experts
    assert not torch.allclose(run(Packed(batch.tokens, batch.cu_seqlens, forced), recompute=False)[0], hidden)

    alone = torch.cat([run(packed(s), recompute=False)[0] for s in sequences])
    assert torch.allclose(alone, hidden, rtol=0, atol=1e-12)


def test_a_row_of_minus_one_is_routed_live(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", VARIANTS["k3"])
    decoder = decoder_of(directory, Build(dtype=torch.float64))
    batch = packed(torch.arange(9))
    with torch.no_grad():
        hidden, routing = decoder.forward_captured(batch)
        routing[-1] = -1
        again, used = decoder.forward_captured(Packed(batch.tokens, batch.cu_seqlens, routing))
    assert torch.equal(hidden, again)
    assert int(used.min()) >= 0


def as_bits(positions: torch.Tensor, width: int) -> torch.Tensor:
    """int `[T, M, k]` positions, -1 for none, as uint8 `[T, M, width]`."""
    chosen = torch.zeros(*positions.shape[:2], 8 * width + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(positions >= 0, positions, 8 * width).long(), True)
    return torch.from_numpy(np.packbits(chosen[..., :-1].numpy(), axis=-1, bitorder="little"))


def test_indexer_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaying what was selected changes nothing; replaying other keys does; a row of zeros selects live."""
    directory = write_checkpoint(tmp_path / "model", VARIANTS["k31-4-heads-topk-3"])
    decoder = decoder_of(directory, Build(dtype=torch.float64))
    batch = packed(torch.arange(9), torch.arange(20, 32))
    starts = torch.tensor([0] * 9 + [9] * 12)[:, None]
    selected: list[torch.Tensor] = []
    plain = MlaAttention.select

    def recording(self: MlaAttention, *arguments: torch.Tensor) -> torch.Tensor | None:
        selected.append(plain(self, *arguments))
        return selected[-1]

    with torch.no_grad():
        monkeypatch.setattr(MlaAttention, "select", recording)
        hidden = decoder(batch)
        monkeypatch.setattr(MlaAttention, "select", plain)
        recorded = torch.stack([torch.where(s >= 0, s - starts, -1) for s in selected], dim=1)
        assert recorded.shape == (21, 2, 3)
        assert torch.equal(decoder(replace(batch, selection=as_bits(recorded, 2))), hidden)
        only_itself = (torch.arange(21)[:, None] - starts).expand(21, 2)[..., None]
        assert not torch.allclose(decoder(replace(batch, selection=as_bits(only_itself, 2))), hidden)
        late = as_bits(recorded, 5)  # the record of a longer neighbour is wider
        late[:5] = late[9:12] = 0
        assert torch.equal(decoder(replace(batch, selection=late)), hidden)


def test_attention_over_the_latent_is_attention_over_expanded_keys(tmp_path: Path) -> None:
    """The form GPUs use, with gradients, and the dense form while the indexer would take every key."""
    directory = write_checkpoint(tmp_path / "model", VARIANTS["k31-4-heads-topk-3"])
    attention = decoder_of(directory, Build(dtype=torch.float64)).layers[2].self_attn
    assert isinstance(attention, MlaAttention) and attention.indexer is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(21, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, 9, 21])
    q, latent = attention.queries(attention.query_latent(x)), attention.latent(x)
    indices = attention.select(attention.query_latent(x), x, bounds, None)
    pull = torch.randn(21, 4, 8, generator=generator, dtype=torch.float64)
    results = []
    for attended in (
        attention.over_latent(q, latent, indices),
        sparse_mla_attention(q, *attention.keys_values(latent), indices, cu_seqlens=bounds, scale=attention.scale),
    ):
        (gradient,) = torch.autograd.grad((attended * pull).sum(), x, retain_graph=True)
        results.append((attended, gradient))
    for over_latent, expanded in zip(*results, strict=True):
        assert torch.allclose(over_latent, expanded, rtol=0, atol=1e-12)

    with torch.no_grad():
        sparse = attention(x, bounds, None, 12)
        assert torch.equal(sparse, attention(x, bounds))
        attention.indexer.topk = 12
        assert torch.equal(attention(x, bounds, None, 12), attention(x, bounds))
        assert not torch.allclose(attention(x, bounds), sparse)


def test_first_step_has_zero_gradient_on_every_a_and_none_on_no_b(tmp_path: Path) -> None:
    from k31core.model.lora import init_adapter

    directory = write_checkpoint(tmp_path / "model", VARIANTS["k31-shared-block-2"])
    decoder = decoder_of(directory, Build(lora=LoraSpec(2, 4.0), recompute=True))
    init_adapter(decoder)
    tokens = torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(1))
    decoder.logits(decoder(packed(tokens))).logsumexp(-1).sum().backward()
    for slot in trainable_slots(decoder):
        largest = float(slot.tensor.grad.abs().max())
        assert (largest == 0) == (".lora_A." in slot.name), slot.name


def test_no_dequantised_experts_survive_the_forward(tmp_path: Path) -> None:
    """Tensors alive after the forward, measured: nothing as large as one layer's dense experts, grad graph included."""
    import gc

    raw = config_of(layers=3, mla=(3,), num_experts=64, moe_intermediate_size=64, routed_expert_hidden_size=64)
    directory = write_checkpoint(tmp_path / "model", raw)
    decoder = decoder_of(directory, Build(lora=LoraSpec(2, 4.0)))
    others = {id(t): t for t in gc.get_objects() if isinstance(t, torch.Tensor)}  # held, so that no id is used again
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hidden = decoder(packed(torch.arange(16)))
    dense_layer = 3 * 64 * 64 * 64
    base = {t.data_ptr() for t in [*decoder.parameters(), *decoder.buffers()]}
    alive = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in others]
    assert any(t is hidden for t in alive)
    large = [t for t in [*kept, *alive] if t.numel() >= dense_layer // 8 and t.data_ptr() not in base]
    assert not large, [tuple(t.shape) for t in large]
    assert hidden.requires_grad
