"""MXFP4 to BF16 at real expert widths: output rate against what the disk takes from plain large writes.

By hand: `python tests/bench/bench_convert.py [DIRECTORY] [--experts 48]`; needs about 5 GB for 48 experts.
"""

import argparse
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from k31core.checkpoint.native import INDEX
from k31core.checkpoint.tensor_file import write_tensor_file
from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
from k31core.convert.verify_bf16 import verify_bf16

CASE = Path(__file__).parents[1] / "cases" / "model" / "tiny-k31"


def make_source(directory: Path, experts: int, shards: int) -> None:
    """Random experts of the published widths in `shards` files, under the tiny case's configuration."""
    directory.mkdir(parents=True)
    shutil.copyfile(CASE / "config.json", directory / "config.json")
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for shard in range(shards):
        tensors = {}
        for expert in range(shard, experts, shards):
            stem = f"language_model.model.layers.1.block_sparse_moe.experts.{expert}"
            for name, (out, width) in {"w1": (3072, 3584), "w3": (3072, 3584), "w2": (3584, 3072)}.items():
                shape = (out, width // 2)
                tensors[f"{stem}.{name}.weight_packed"] = torch.randint(
                    0, 256, shape, dtype=torch.uint8, generator=generator
                )
                tensors[f"{stem}.{name}.weight_scale"] = torch.randint(
                    110, 130, (out, width // 32), dtype=torch.uint8, generator=generator
                )
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        write_tensor_file(directory / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def plain_write_rate(directory: Path, total: int) -> float:
    """Bytes per second of 64 MiB writes of random data, flushed at the end."""
    block = os.urandom(64 << 20)
    path = directory / "plain"
    begun = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(total // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = total // len(block) * len(block) / (time.perf_counter() - begun)
    path.unlink()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("/tmp/k31-bench-convert"))
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    root: Path = arguments.directory
    shutil.rmtree(root, ignore_errors=True)
    make_source(root / "mxfp4", arguments.experts, shards=4)
    output = arguments.experts * 3 * 3584 * 3072 * 2
    disk = plain_write_rate(root, output)
    print(f"output {output / 1e9:.2f} GB, {arguments.workers} workers, load {os.getloadavg()[0]:.1f}")
    seconds, cpu = measured(lambda: convert_to_bf16(root / "mxfp4", root / "bf16", workers=arguments.workers))
    print(
        f"plain writes {disk / 1e6:.0f} MB/s; conversion {output / seconds / 1e6:.0f} MB/s, "
        f"ratio {output / seconds / disk:.2f}, {output / cpu / 1e6:.0f} MB per CPU second"
    )
    seconds, cpu = measured(lambda: verify_bf16(root / "mxfp4", root / "bf16", workers=arguments.workers))
    print(f"verify {output / seconds / 1e6:.0f} MB/s of BF16, {output / cpu / 1e6:.0f} MB per CPU second")
    shutil.rmtree(root)


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds, CPU seconds of the processes that it started)."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begun, cpu


if __name__ == "__main__":
    main()
