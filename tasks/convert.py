"""Stage prepare, Kimi-K3's path: MXFP4 to BF16 to torch_dist, each cached by content and resumable."""

import concurrent.futures
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from k31core.checkpoint.fingerprint import checkpoint_fingerprint
from k31core.convert.shard_pool import begin_child
from k31core.recipe.model import bf16_dir, torch_dist_dir
from tasks.storage import ContentKey, describe_file

CONVERT_VERSION = 2
"""Raise when a conversion changes what it writes."""
_FACTS = "k31_torch_dist.json"


def convert_for_training(model_dir: Path) -> Path:
    """Both conversions of a checkpoint; returns the torch_dist directory that the trainer loads."""
    source = checkpoint_fingerprint(model_dir)
    mxfp4_to_bf16(str(model_dir), source)
    return Path(bf16_to_torch_dist(str(model_dir), source)["directory"])


@task(
    name="mxfp4-to-bf16",
    task_run_name="mxfp4-to-bf16",
    cache_policy=ContentKey(fields=("model_dir", "source"), version=CONVERT_VERSION),
    persist_result=True,
    result_serializer="json",
)
def mxfp4_to_bf16(model_dir: str, source: str) -> dict[str, Any]:
    """Decode the experts into a BF16 checkpoint beside the source and prove it; finished shards are kept.

    source: the checkpoint's fingerprint; another checkpoint in the same directory is another task result.
    """
    target = bf16_dir(Path(model_dir))
    counts = _in_child(_decode, Path(model_dir), target)
    get_run_logger().info("%d expert weights decoded, packed again and found bit-equal", counts["experts"])
    return {"directory": str(target), "files": _described(target)}


@task(
    name="bf16-to-torch-dist",
    task_run_name="bf16-to-torch-dist",
    cache_policy=ContentKey(fields=("model_dir", "source"), version=CONVERT_VERSION),
    persist_result=True,
    result_serializer="json",
)
def bf16_to_torch_dist(model_dir: str, source: str) -> dict[str, Any]:
    """Write the torch_dist checkpoint, in one process; many ranks of `k31 convert` may have done so before.

    A finished one of this source is kept; of another source it is refused by name.
    """
    target = torch_dist_dir(Path(model_dir))
    if target.exists() and not (target / _FACTS).is_file():
        shutil.rmtree(target)  # ours by its name, and never finished
    _in_child(_shard, bf16_dir(Path(model_dir)), target)
    return {"directory": str(target), "files": _described(target)}


def _described(directory: Path) -> list[dict[str, Any]]:
    """Manifest entries of every file, hashed several at a time (hashing leaves the interpreter free)."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(describe_file, paths))


def _in_child(work: Any, source: Path, target: Path) -> Any:
    """A process of its own, so that its memory goes away; it does not outlive a killed run."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, initializer=begin_child) as pool:
        return pool.submit(work, source, target).result()


def _decode(source: Path, target: Path) -> dict[str, int]:
    from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
    from k31core.convert.verify_bf16 import verify_bf16

    convert_to_bf16(source, target)
    return verify_bf16(source, target)


def _shard(source: Path, target: Path) -> None:
    import tempfile

    from k31core.convert.bf16_to_torch_dist import convert_to_torch_dist
    from k31core.parallel.groups import init_process_group
    from k31core.recipe.train import ParallelRecipe

    with tempfile.TemporaryDirectory() as scratch:
        init_process_group("gloo", f"file://{scratch}/store", 0, 1, timeout_minutes=60)
        convert_to_torch_dist(source, target, ParallelRecipe())
