"""By hand: the rate of a full check against the rates of the disk and of sha256 on this machine.

python -m tests.bench.bench_verify --folder DIR --gigabytes 4 --files 8
"""

import argparse
import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k31core.checkpoint.verify_directory import verify_directory
from k31core.checkpoint.verify_files import FILES_MANIFEST

_BLOCK = 4 << 20


def sha256_rate(workers: int, seconds: float = 3.0) -> tuple[float, float]:
    """(bytes a second, bytes a processor second) of sha256 on memory, `workers` threads."""

    def hash_blocks(_: int) -> int:
        block, digest, done, end = os.urandom(_BLOCK), hashlib.sha256(), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            digest.update(block)
            done += len(block)
        return done

    cpu = time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        done = sum(pool.map(hash_blocks, range(workers)))
    return done / seconds, done / (time.process_time() - cpu)


def read_rate(files: list[Path], workers: int) -> float:
    """Bytes a second of reading the files and nothing else."""

    def read(path: Path) -> int:
        buffer, done = bytearray(_BLOCK), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done += count
        return done

    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(read, files)) / (time.monotonic() - started)


def drop_cached(files: list[Path]) -> None:
    """Asks the kernel to forget the files' pages, so that the disk is read."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Command line: makes the files, measures cold and warm, removes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--files", type=int, default=8)
    options = parser.parse_args()
    folder = options.folder / "k31-bench-verify"
    folder.mkdir(parents=True)
    workers = os.cpu_count() or 1
    try:
        size = int(options.gigabytes * 1e9 / options.files)
        block = os.urandom(_BLOCK)
        for number in range(options.files):
            with (folder / f"{number}.bin").open("wb") as file:
                for start in range(0, size, _BLOCK):
                    file.write(block[: min(_BLOCK, size - start)])
        files = sorted(folder.glob("*.bin"))
        hashing, hashing_cpu = sha256_rate(workers)
        print(f"sha256, {workers} threads: {hashing / 1e9:.2f} GB/s, {hashing_cpu / 1e9:.2f} GB a processor second")
        for name in ("cold", "warm"):
            if name == "cold":
                drop_cached(files)
            reading = read_rate(files, workers)
            if name == "cold":
                drop_cached(files)
            (folder / FILES_MANIFEST).unlink(missing_ok=True)
            cpu = time.process_time()
            report = verify_directory(folder, full=True)
            per_cpu = report.hashed_bytes / (time.process_time() - cpu)
            rate = report.hashed_bytes / report.seconds
            share = rate / min(reading, hashing)
            print(
                f"{name}: reading {reading / 1e9:.2f} GB/s, verify {rate / 1e9:.2f} GB/s, {share:.0%} of the lower; ",
                end="",
            )
            print(f"{per_cpu / 1e9:.2f} GB a processor second, {per_cpu / hashing_cpu:.0%} of sha256 alone")
        started = time.monotonic()
        verify_directory(folder, full=False)
        print(f"incremental: {time.monotonic() - started:.3f} s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
