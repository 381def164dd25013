"""By hand: rate of the native reader on one rank with a cold cache, against `dd iflag=direct` on the same files.

    python tests/bench/bench_native_read.py [--gigabytes 2] [--rounds 3] [--directory DIR]

Writes a checkpoint of large experts, drops its pages from the page cache before every measurement, and alternates dd
and reader so that a disk whose rate drifts treats both alike.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from k31core.checkpoint.native import NativeCheckpoint, write_native_checkpoint
from k31core.model.build import Build
from k31core.model.config import parse_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import base_slots, native_tensors
from tests.model_cases import config_of


def drop(files: list[Path]) -> None:
    """Forget the pages of these files."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def dd_rate(files: list[Path]) -> float:
    """Bytes a second of dd, past the page cache."""
    begun = time.perf_counter()
    for path in files:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct"], check=True, capture_output=True)
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    wide = {"moe_intermediate_size": 2048, "routed_expert_hidden_size": 2048}
    one = 3 * 2048 * 2048 * 0.53125
    raw = config_of(layers=5, mla=(5,), num_experts=round(options.gigabytes * 1e9 / 4 / one), **wide)
    decoder = Decoder(parse_config(raw), Build())
    for slot in base_slots(decoder):
        slot.tensor.data.random_(0, 200) if slot.tensor.dtype == torch.uint8 else slot.tensor.data.zero_()
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        write_native_checkpoint(directory, raw, native_tensors(decoder), shard_bytes=1 << 30)
        files = sorted(directory.glob("*.safetensors"))
        direct, ours = [], []
        for _ in range(options.rounds):
            drop(files)
            direct.append(dd_rate(files))
            drop(files)
            report = NativeCheckpoint(directory).load(base_slots(decoder), progress=False)
            ours.append(report.bytes_per_second)
            ranges = sum(len(found) for found in report.requested.values())
            print(f"dd {direct[-1] / 1e6:.0f} MB/s, reader {ours[-1] / 1e6:.0f} MB/s, {ranges} ranges", flush=True)
        reader, dd = statistics.median(ours), statistics.median(direct)
        print(f"median: dd {dd / 1e6:.0f} MB/s, reader {reader / 1e6:.0f} MB/s, ratio {reader / dd:.2f}")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
