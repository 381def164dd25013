"""Adapter export on one GPU: flatten into 2 GiB buckets, digests on the way, 50 syncs; against plain device copies.

Run by hand: `python tests/bench/bench_adapter_export.py [--out results.json]`. The adapter is a MoE layer's factors of
one rank at the recipe's shapes (112 experts, rank 32), repeated until it fills several buckets.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from k31core.ops.digest import Flattener, check_equal, unflatten
from k31core.ops.digest.bucket import DEFAULT_BUCKET_BYTES
from k31core.ops.digest.kernel import copy_and_digest, plan_copies
from k31core.ops.digest.tensor import digests_of_sums
from tests.bench.device_time import milliseconds

EXPERTS, LATENT, FFN, RANK, LAYERS = 112, 3584, 3072, 32, 92


def make_adapter() -> dict[str, Tensor]:
    shapes = {
        "w1.lora_A": (1, RANK, LATENT),
        "w1.lora_B": (EXPERTS, FFN, RANK),
        "w3.lora_A": (1, RANK, LATENT),
        "w3.lora_B": (EXPERTS, FFN, RANK),
        "w2.lora_A": (EXPERTS, RANK, FFN),
        "w2.lora_B": (1, LATENT, RANK),
    }
    names = [(f"layers.{i}.experts.{name}", shape) for i in range(LAYERS) for name, shape in shapes.items()]
    return {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in names}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tensors = make_adapter()
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    flattener = Flattener(tensors)
    receiver = {name: torch.empty_like(t) for name, t in tensors.items()}
    tables = [
        plan_copies([(receiver[s.name].data_ptr(), s.offset, s.num_bytes, 0) for s in slots], torch.device("cuda"))
        for slots in flattener.plan
    ]
    sums = [torch.zeros(len(slots), 2, dtype=torch.int64, device="cuda") for slots in flattener.plan]

    def export(digest: bool) -> None:
        for _ in flattener.buckets(digest=digest):
            pass

    def whole_sync(digest: bool) -> None:
        for bucket, table, sum_ in zip(flattener.buckets(digest=digest), tables, sums, strict=True):
            copy_and_digest(table, bucket.data, sum_.zero_() if digest else None, out=True)

    big = torch.empty(DEFAULT_BUCKET_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(big)
    copy_ms = milliseconds(lambda: target.copy_(big)) * total / big.numel()
    separate = [torch.zeros_like(s) for s in sums]
    digest_tables = [
        plan_copies([(tensors[s.name].data_ptr(), 0, s.num_bytes, 0) for s in slots], torch.device("cuda"))
        for slots in flattener.plan
    ]

    def digest_only() -> None:
        for table, sum_ in zip(digest_tables, separate, strict=True):
            copy_and_digest(table, None, sum_.zero_())

    def torch_flatten() -> None:
        for slots in flattener.plan:
            torch.cat([tensors[s.name].view(torch.uint8).view(-1) for s in slots])

    results: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "adapter_gib": total / 2**30,
        "tensors": len(tensors),
        "buckets": len(flattener.plan),
        "plain_copy_ms": copy_ms,
        "export_ms": milliseconds(lambda: export(False)),
        "export_digest_ms": milliseconds(lambda: export(True)),
        "sync_ms": milliseconds(lambda: whole_sync(False)),
        "sync_digest_both_sides_ms": milliseconds(lambda: whole_sync(True)),
        "digest_alone_ms": milliseconds(digest_only),
        "torch_cat_ms": milliseconds(torch_flatten),
    }
    received = {}
    for slots, sum_ in zip(flattener.plan, sums, strict=True):
        digests = digests_of_sums(sum_, [s.num_bytes for s in slots])
        received.update(zip((s.name for s in slots), digests, strict=True))
    check_equal(flattener.digests(), received)
    results["receiver_equal"] = all(torch.equal(receiver[name], t) for name, t in tensors.items())
    views = {n: v for b in flattener.buckets() for n, v in unflatten(b.data, b.slots).items()}
    results["views"] = len(views)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(50):
        whole_sync(True)
    torch.cuda.synchronize()
    results["growth_after_50_syncs_bytes"] = torch.cuda.memory_allocated() - before[0]
    results["peak_over_50_syncs_bytes"] = torch.cuda.max_memory_allocated() - before[0]
    plain = float(copy_ms)
    for name in ("export_ms", "export_digest_ms"):
        results[name.replace("_ms", "_share_of_copy_bandwidth")] = plain / float(results[name])  # type: ignore[arg-type]
    results["digest_cost_of_export"] = float(results["export_digest_ms"]) / float(results["export_ms"]) - 1  # type: ignore[arg-type]
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
