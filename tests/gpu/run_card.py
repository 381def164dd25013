"""By hand, on a machine with a GPU: every GPU test and benchmark, one after the other, each under its own time limit.

    python tests/gpu/run_card.py --out DIR [--only experts,kda] [--budget-s 540]

A line is printed when an item ends; its output is DIR/<item>.log and DIR/summary.json holds exit codes and seconds, so
what ended before a machine was taken away is kept. Needs torch, triton and pytest; an item whose packages are missing
fails in its log, the others run. Ends with code 1 when an item failed or found no time left.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Item:
    """One command and the seconds it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    """A first run builds kernels: the limits leave room for that."""


def tests(name: str, file: str, limit_s: int, *, marker: str = "gpu") -> Item:
    """A file of tests; `-m` because they are left out by default."""
    return Item(
        name, ("-m", "pytest", "-m", marker, "-q", "-s", "--durations=5", "-p", "no:cacheprovider", file), limit_s
    )


ITEMS = (
    tests("elementwise", "tests/gpu/test_gpu_elementwise.py", 90),
    tests("experts", "tests/gpu/test_experts_kernel.py", 180),
    tests("logprobs", "tests/gpu/test_gpu_logprobs.py", 90),
    tests("dsa", "tests/gpu/test_gpu_dsa.py", 120),
    tests("digest", "tests/gpu/test_digest_gpu.py", 60),
    Item("warm-fla", ("tests/bench/warm_fla.py",), 240),
    tests("kda", "tests/gpu/test_gpu_kda.py", 120),
    tests("decoder", "tests/gpu/test_gpu_decoder.py", 180),
    tests("train-step", "tests/gpu/test_gpu_train_step.py", 180),
    tests("hybrid-optimizer", "tests/gpu/test_hybrid_optimizer.py", 120),
    tests("engine", "tests/gpu/test_gpu_engine.py", 180),
    Item("bench-experts", ("tests/bench/bench_experts.py",), 180),
    Item("bench-ops", ("tests/bench/bench_ops.py",), 240),
    Item("bench-export", ("tests/bench/bench_adapter_export.py",), 90),
    tests("layouts-nccl", "tests/parity/test_nccl.py", 300, marker="multigpu"),
)


def run_item(item: Item, out: Path, seconds: float) -> dict[str, object]:
    """Run one item in a process of its own; what it printed is kept even when it is stopped."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    with (out / f"{item.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *item.command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout=min(item.limit_s, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = "out of time"
    return {"item": asdict(item), "code": code, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    """Run the chosen items; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help=f"comma-separated, of: {', '.join(item.name for item in ITEMS)}")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else [item.name for item in ITEMS]
    unknown = set(names) - {item.name for item in ITEMS}
    if unknown:
        parser.error(f"--only: unknown items {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.budget_s
    results: list[dict[str, object]] = []
    for item in ITEMS:
        if item.name not in names:
            continue
        left = deadline - time.monotonic()
        result = run_item(item, arguments.out, left) if left > 5 else {"item": asdict(item), "code": "no time left"}
        results.append(result)
        (arguments.out / "summary.json").write_text(json.dumps(results, indent=1))
        print(f"{item.name:18} {result['code']!s:12} {result.get('seconds', 0):>6} s", flush=True)
    return int(any(result["code"] != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
