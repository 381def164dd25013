"""Digest and buckets on the card: the same bits as on the CPU, whole copies, no allocation from sync to sync."""

import pytest
import torch

from k31core.ops.digest import Flattener, check_equal, digest_of_tensor, unflatten

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def adapter() -> dict[str, torch.Tensor]:
    sizes = {"a": (1000, 333), "b": (1, 1 << 20), "c": (3, 5, 11), "empty": (0, 4), "one": (1,)}
    tensors = {name: torch.randn(shape, device="cuda") for name, shape in sizes.items()}
    odd = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8, device="cuda")
    return {**tensors, "half": tensors["a"].bfloat16(), "bytes": odd}


@pytest.mark.parametrize("size", [0, 1, 7, 8, 65535, 65536, 65544, 10_000_019])
def test_equal_to_the_cpu_to_the_bit(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    assert digest_of_tensor(data) == digest_of_tensor(data.cpu())
    if size > 100_000:
        parts = [digest_of_tensor(data[a:b].clone(), first_byte=a) for a, b in ((0, 80_000), (80_000, size))]
        assert parts[1] + parts[0] == digest_of_tensor(data)


def test_buckets_arrive_whole_and_their_digests_agree() -> None:
    tensors = adapter()
    flattener = Flattener(tensors, 3 << 20)
    received = {}
    for bucket in flattener.buckets():
        for name, tensor in unflatten(bucket.data, bucket.slots).items():
            assert torch.equal(tensor, tensors[name])
            received[name] = digest_of_tensor(tensor.cpu())
    assert len(flattener.plan) > 1
    check_equal(flattener.digests(), received)


def test_fifty_syncs_allocate_nothing() -> None:
    tensors = adapter()
    flattener = Flattener(tensors, 3 << 20)
    sums = []
    for sync in range(51):
        for bucket in flattener.buckets():
            sums.append(int(bucket.data[0]))
        flattener.digests()
        torch.cuda.synchronize()
        if sync == 0:
            before, peak = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() == peak
