"""The digest against plain Python integers, and buckets there and back."""

import pytest
import torch

from k31core.ops.digest import (
    BucketError,
    Digest,
    DigestMismatch,
    Flattener,
    check_equal,
    digest_of_tensor,
    flatten,
    plan_buckets,
    unflatten,
)

MASK = (1 << 64) - 1


def slow_digest(data: bytes, first_byte: int = 0) -> Digest:
    """The definition, one word at a time, in Python integers."""
    low = high = 0
    for start in range(0, len(data), 8):
        word = int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little")
        z = word ^ (((first_byte + start) // 8 + 1) * 0x9E3779B97F4A7C15 & MASK)
        z = (z ^ z >> 32) * 0xBF58476D1CE4E5B9 & MASK
        z ^= z >> 29
        for_low, for_high = z * 0x94D049BB133111EB & MASK, z * 0xD6E8FEB86659FD93 & MASK
        low, high = low + (for_low ^ for_low >> 32), high + (for_high ^ for_high >> 32)
    return Digest(low & MASK, high & MASK, len(data))


def adapter(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 33), "b": (1, 4096), "c": (3, 5, 11), "empty": (0, 4), "one": (1,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, "half": tensors["a"].bfloat16(), "bytes": torch.arange(13, dtype=torch.uint8)}


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 12345])
def test_reference_equals_the_definition(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert digest_of_tensor(data) == slow_digest(data.numpy().tobytes())


def test_dtype_does_not_matter_but_bytes_do() -> None:
    x = torch.randn(64, 3)
    assert digest_of_tensor(x) == digest_of_tensor(x.view(torch.int32)) == slow_digest(x.numpy().tobytes())
    changed = x.clone()
    changed.view(torch.int32)[5, 1] ^= 1
    assert digest_of_tensor(changed) != digest_of_tensor(x)


def test_every_single_bit_and_every_swap_shows() -> None:
    data = torch.randint(0, 256, (96,), dtype=torch.uint8)
    seen = {digest_of_tensor(data).hex()}
    for bit in range(96 * 8):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest_of_tensor(flipped).hex())
    words = data.view(torch.int64)
    for i in range(12):
        for j in range(i):
            swapped = words.clone()
            swapped[[i, j]] = words[[j, i]]
            seen.add(digest_of_tensor(swapped).hex())
    assert len(seen) == 1 + 96 * 8 + 66
    assert digest_of_tensor(torch.zeros(8)) != digest_of_tensor(torch.zeros(10))


def test_shards_combine_in_any_order() -> None:
    x = torch.randn(1000, 4)
    parts = [digest_of_tensor(x[a:b], first_byte=a * 16) for a, b in ((300, 700), (0, 300), (700, 1000))]
    assert parts[0] + parts[1] + parts[2] == digest_of_tensor(x)
    assert parts[0] != digest_of_tensor(x[300:700])
    with pytest.raises(ValueError, match="multiple of 8"):
        digest_of_tensor(x, first_byte=4)


def test_non_contiguous_and_unaligned_are_refused() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"contiguous, got strides \(1, 8\)"):
        digest_of_tensor(x.t())
    with pytest.raises(ValueError, match="8 bytes"):
        digest_of_tensor(x.view(-1)[1:])


@pytest.mark.parametrize("bucket_bytes", [16, 1000, 20000, 1 << 30])
def test_flatten_and_back(bucket_bytes: int) -> None:
    tensors = adapter()
    found: dict[str, torch.Tensor] = {}
    for bucket in flatten(tensors, bucket_bytes):
        largest = max(slot.num_bytes for slot in bucket.slots)
        assert bucket.data.numel() <= max(bucket_bytes, largest)
        found.update({name: t.clone() for name, t in unflatten(bucket.data, bucket.slots).items()})
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_digests_follow_the_values_and_find_damage() -> None:
    tensors = adapter()
    flattener = Flattener(tensors, 20000)
    received: dict[str, Digest] = {}
    for bucket in flattener.buckets():
        received.update({n: digest_of_tensor(t.clone()) for n, t in unflatten(bucket.data, bucket.slots).items()})
    check_equal(flattener.digests(), received)
    tensors["c"] += 1
    for _ in flattener.buckets():
        pass
    with pytest.raises(DigestMismatch, match=r"1 of 7 tensors differ after the copy, the first is 'c'"):
        check_equal(flattener.digests(), received)
    with pytest.raises(DigestMismatch, match="one side only, the first is 'a'"):
        check_equal(flattener.digests(), {n: d for n, d in received.items() if n != "a"})


def test_the_buffer_is_reused() -> None:
    flattener = Flattener(adapter(), 18000)
    addresses = {bucket.data.data_ptr() for _ in range(50) for bucket in flattener.buckets()}
    assert len(addresses) == 1 and len(flattener.plan) > 1


def test_bad_buckets_are_refused() -> None:
    with pytest.raises(BucketError, match="no tensors"):
        Flattener({})
    with pytest.raises(BucketError, match="at least 16"):
        plan_buckets(adapter(), 8)
    slots = plan_buckets(adapter())[0]
    with pytest.raises(BucketError, match="uint8 with at least"):
        unflatten(torch.zeros(8, dtype=torch.uint8), slots)
    tensors = adapter()
    flattener = Flattener(tensors)
    tensors["a"].set_(torch.zeros_like(tensors["a"]))
    with pytest.raises(BucketError, match="a moved"):
        next(flattener.buckets())
