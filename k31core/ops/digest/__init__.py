"""Tensor digests on the device the tensor lives on, and flat buckets that carry an adapter in a few large copies."""

from k31core.ops.digest.bucket import Bucket, BucketError, Flattener, Slot, flatten, plan_buckets, unflatten
from k31core.ops.digest.tensor import digest_of_tensor
from k31core.ops.digest.value import Digest, DigestMismatch, check_equal

__all__ = [
    "Bucket",
    "BucketError",
    "Digest",
    "DigestMismatch",
    "Flattener",
    "Slot",
    "check_equal",
    "digest_of_tensor",
    "flatten",
    "plan_buckets",
    "unflatten",
]
