"""What CUDA graphs add around a decoding step: buckets, and padding that changes no bit of a real row. On a CPU."""

import logging

import pytest
import torch

from k31core.convert.tiny_model import init_weights, tiny_config
from k31core.model.build import Build
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.rollout.engines.embedded.cache import Caches
from k31core.rollout.engines.embedded.core import EngineCore, Limits
from k31core.rollout.engines.embedded.forward import CachedDecoder, StepInput
from k31core.rollout.engines.embedded.graphs import bucket_of, padded_step


def cached_decoder() -> CachedDecoder:
    decoder = Decoder(parse_config(tiny_config(family="kimi_k31", hidden_size=64, num_hidden_layers=4)), Build())
    init_weights(decoder, 0)
    for name, buffer in decoder.named_buffers():
        generator = torch.Generator().manual_seed(len(name))
        if name.endswith("_packed"):
            buffer.copy_(torch.randint(0, 256, buffer.shape, generator=generator))
        elif name.endswith("_scale"):
            buffer.fill_(122)
    return CachedDecoder(decoder, dense_experts_bytes=0)  # the path that graphs capture


def step_of(rows: int, blocks: int, generator: torch.Generator) -> StepInput:
    """Every row has its own pages and stands somewhere in its last block."""
    position = torch.randint(64 * (blocks - 1), 64 * blocks, (rows,), generator=generator)
    pages = 1 + torch.arange(rows * blocks).view(rows, blocks)
    return StepInput(torch.randint(0, 32, (rows,), generator=generator), position, pages)


@pytest.mark.parametrize(
    ("rows", "blocks", "bucket"),
    [(8, 1, (8, 1)), (24, 3, (32, 4)), (40, 5, (48, 8)), (48, 9, (48, 12)), (8, 12, (8, 12))],
)
def test_buckets_are_powers_of_two_within_the_caches(rows: int, blocks: int, bucket: tuple[int, int]) -> None:
    step = step_of(rows, blocks, torch.Generator().manual_seed(0))
    assert bucket_of(step, max_rows=48, max_blocks=12) == bucket


@torch.inference_mode()
def test_a_padded_step_gives_the_same_bits_and_leaves_the_same_caches() -> None:
    decoder, generator = cached_decoder(), torch.Generator().manual_seed(3)
    step = step_of(8, 3, generator)
    caches = [Caches(decoder.config, 16, 24, torch.float32, torch.device("cpu")) for _ in range(2)]
    for name in ("conv", "state", "latent", "index_keys"):
        values = torch.randn(getattr(caches[0], name).shape, generator=generator) * 0.3
        for cache in caches:
            getattr(cache, name).copy_(values)
    plain = decoder.decode(step, caches[0])
    padded = decoder.decode(padded_step(step, 16, 4), caches[1])
    assert torch.equal(plain[0][:8], padded[0][:8])
    assert torch.equal(plain[1][:8], padded[1][:8])
    assert torch.equal(caches[0].state[:, :8], caches[1].state[:, :8])
    assert torch.equal(caches[0].conv[:, :8], caches[1].conv[:, :8])
    assert torch.equal(caches[0].latent[:, 1:], caches[1].latent[:, 1:])  # page 0 is nobody's
    assert torch.equal(caches[0].index_keys[:, 1:], caches[1].index_keys[:, 1:])


def test_on_a_cpu_graphs_are_off_and_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from k31core.rollout.engines.embedded import graphs

    graphs._log_once.cache_clear()
    decoder = cached_decoder()
    with caplog.at_level(logging.WARNING):
        cores = [EngineCore(decoder, Limits(8, 512, 64), cuda_graphs=True) for _ in range(2)]
    assert all(core._graphs is None for core in cores)
    assert [r.message for r in caplog.records] == ["decoding without CUDA graphs: the engine computes on cpu"]
