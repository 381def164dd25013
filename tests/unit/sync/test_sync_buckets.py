"""Payloads of engine ranks put together from buckets: complete, disjoint, bounded, and freed on time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31core.ops.digest import digest_of_tensor, unflatten
from k31core.sync.buckets import EngineRank, InFlight, assemble, one_bucket
from k31core.sync.publisher import SyncError

ADAPTER = load_file(Path(__file__).parents[2] / "cases" / "model" / "tiny-k31-adapter" / "adapter_model.safetensors")


def rename(name: str) -> str:
    return f"engine.{name}"


def in_buckets(limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Logical tensors in buckets that are overwritten after each one, as the trainer's gather does."""
    bucket: list[tuple[str, Tensor]] = []
    for name in sorted(ADAPTER):
        bucket.append((name, ADAPTER[name].clone()))
        if sum(t.numel() * 4 for _, t in bucket) > limit:
            yield bucket
            for _, tensor in bucket:
                tensor.fill_(float("nan"))
            bucket = []
    if bucket:
        yield bucket


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_ranks_together_hold_the_adapter_exactly_once(size: int) -> None:
    ranks = [assemble(in_buckets(20_000), EngineRank(i, size, 8), rename).tensors for i in range(size)]
    for name, whole in ADAPTER.items():
        parts = [rank[rename(name)] for rank in ranks]
        if ".experts." in name and whole.shape[0] == 8:
            assert torch.equal(torch.cat(parts), whole)
            assert all(part.shape[0] == 8 // size for part in parts)
        else:
            assert all(torch.equal(part, whole) for part in parts)


def test_a_rank_holds_its_share_and_one_bucket_only() -> None:
    whole = sum(t.numel() * 4 for t in ADAPTER.values())
    experts = sum(t.numel() * 4 for n, t in ADAPTER.items() if ".experts." in n and t.shape[0] == 8)
    payload = assemble(in_buckets(20_000), EngineRank(3, 8, 8), rename)
    assert payload.num_bytes == whole - experts + experts // 8
    assert payload.largest_bucket_bytes < 60_000 < whole
    assert payload.digests == {name: digest_of_tensor(t) for name, t in payload.tensors.items()}


def test_the_published_size_fits_one_bucket_an_engine_rank() -> None:
    """EP32: 48.6 GB of per-expert factors over 32 ranks and 0.4 GB of shared ones are below 2 GiB."""
    assert 48.6e9 / 32 + 0.4e9 < 2 * 1024**3
    assert EngineRank(31, 32, 896).rows() == range(868, 896)


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(SyncError, match=r"896 experts over 10 engine ranks leave a rest: set rollout\.engine\.ep_size"):
        EngineRank(0, 10, 896).rows()


def test_a_factor_with_other_experts() -> None:
    with pytest.raises(SyncError, match=r"a\.experts\.w1 has 7 rows, expected 8 experts or 1 shared factor"):
        EngineRank(0, 2, 8).part("a.experts.w1", torch.zeros(7, 2, 2))


def test_a_tensor_that_comes_twice_and_none_at_all() -> None:
    twice = [[("a", torch.zeros(2)), ("a", torch.zeros(2))]]
    with pytest.raises(SyncError, match="a came twice"):
        assemble(twice, EngineRank(0, 1, 8), rename)
    with pytest.raises(SyncError, match="no tensors"):
        assemble([], EngineRank(0, 1, 8), rename)


def test_one_bucket_holds_all_dtypes() -> None:
    tensors = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.randn(3, 5), "c": torch.randn(7).bfloat16()}
    bucket = one_bucket(tensors)
    back = unflatten(bucket.data, bucket.slots)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_memory_in_flight_is_kept_until_it_is_released_by_name() -> None:
    kept = InFlight()
    kept.keep(3, torch.zeros(10, dtype=torch.uint8))
    kept.keep(3, torch.zeros(4, dtype=torch.float32))
    assert kept.num_bytes == 26
    with pytest.raises(SyncError, match=r"version 4 is not in flight \(kept: \[3\]\)"):
        kept.release(4)
    assert kept.release(3) == 26
    assert kept.num_bytes == 0
