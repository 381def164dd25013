"""megatron-core's hybrid optimizer against plain AdamW on one GPU: same numbers, state where the recipe says."""

import dataclasses

import pytest
import torch

from k31core.parallel.sharding import Shard, Slot, Stored
from k31core.train.adamw import AdamSettings, AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("bounded"),
]
SHAPES = [(64, 96), (1, 8, 128), (16, 8, 32), (96, 8), (8, 1, 256)]
SETTINGS = AdamSettings(0.9, 0.98, 1e-8, 0.1)


def make_slots(dtype, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    slots = []
    for index, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        slots.append(Slot(f"f{index}.lora_B.weight", torch.nn.Parameter(value), Shard(shape, Stored.FACTOR)))
    return slots


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).cuda() for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision_aware", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_hybrid_follows_plain_adamw_and_reads_its_save(dtype, precision_aware, overlap, say):
    say(dtype, f"precision_aware {precision_aware}, overlap {overlap}")
    from k31core.train.hybrid import HybridAdamW

    plain = AdamW(make_slots(dtype), SETTINGS)
    hybrid = HybridAdamW(
        make_slots(dtype), SETTINGS, offload_fraction=0.8, overlap=overlap, precision_aware=precision_aware
    )
    total = sum(s.tensor.numel() for s in hybrid.slots)
    assert 0.8 * total <= hybrid.offloaded_entries < total
    for step in range(4):
        plain.apply(gradients(step), lr=1e-2 / (step + 1))
        hybrid.apply(gradients(step), lr=1e-2 / (step + 1))
    torch.cuda.synchronize()
    assert hybrid.updates == plain.updates == 4
    expected = {s.name: s.tensor for s in plain.state_slots()}
    found = {s.name: s.tensor for s in hybrid.state_slots()}
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name].cuda(), tensor, rtol=1e-5, atol=1e-6), name
    worst = max(
        float(((a.tensor - b.tensor).float().abs().max() / b.tensor.float().abs().max()).detach())
        for a, b in zip(hybrid.slots, plain.slots)
    )
    assert worst < (1e-6 if dtype == torch.float32 else 2**-8)

    resumed = HybridAdamW(
        [dataclasses.replace(s, tensor=torch.nn.Parameter(s.tensor.detach().clone())) for s in plain.slots],
        SETTINGS,
        offload_fraction=0.8,
        overlap=overlap,
        precision_aware=precision_aware,
    )
    with torch.no_grad():
        for slot in resumed.state_slots():
            slot.tensor.copy_(expected[slot.name])
    resumed.updates = plain.updates
    plain.apply(gradients(9), lr=1e-3)
    resumed.apply(gradients(9), lr=1e-3)
    torch.cuda.synchronize()
    for a, b in zip(resumed.slots, plain.slots):
        assert torch.allclose(a.tensor.float(), b.tensor.float(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)


def test_gpu_memory_of_the_two_ways_to_keep_masters(say):
    """Precision-aware keeps no fp32 copy of the off-loaded factors on the GPU."""
    from k31core.train.hybrid import HybridAdamW

    used = {}
    shape = (4096, 4096)
    for precision_aware in (False, True):
        factor = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        optimizer = HybridAdamW(
            [Slot("x.lora_B.weight", factor, Shard(shape, Stored.FACTOR))],
            SETTINGS,
            offload_fraction=1.0,
            overlap=True,
            precision_aware=precision_aware,
        )
        used[precision_aware] = torch.cuda.memory_allocated() - before
        del optimizer, factor
    assert used[False] - used[True] >= 4 * shape[0] * shape[1]
    say(f"extra GPU bytes: precision-aware off {used[False]}, on {used[True]}")
