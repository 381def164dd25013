"""Stage prepare, Kimi-K3's path: MXFP4 to BF16 to torch_dist, each cached by content and resumable."""

import concurrent.futures
import hashlib
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from k31core.recipe.model import bf16_dir, torch_dist_dir
from tasks.storage import ContentKey, describe_files

CONVERT_VERSION = 1
"""Raise when a conversion changes what it writes."""
_FACTS = "k31_torch_dist.json"


def convert_for_training(model_dir: Path) -> Path:
    """Both conversions of a checkpoint; returns the torch_dist directory that the trainer loads."""
    index = hashlib.sha256((model_dir / "model.safetensors.index.json").read_bytes()).hexdigest()
    mxfp4_to_bf16(str(model_dir), index)
    return Path(bf16_to_torch_dist(str(model_dir), index)["directory"])


@task(
    name="mxfp4-to-bf16",
    task_run_name="mxfp4-to-bf16",
    cache_policy=ContentKey(fields=("model_dir", "index"), version=CONVERT_VERSION),
    persist_result=True,
    result_serializer="json",
)
def mxfp4_to_bf16(model_dir: str, index: str) -> dict[str, Any]:
    """Decode the experts into a BF16 checkpoint beside the source and prove it; finished shards are kept."""
    source = Path(model_dir)
    counts = _in_child(_decode, source, bf16_dir(source))
    get_run_logger().info("%d expert weights decoded, packed again and found bit-equal", counts["experts"])
    return {"directory": str(bf16_dir(source)), "files": describe_files(bf16_dir(source))}


@task(
    name="bf16-to-torch-dist",
    task_run_name="bf16-to-torch-dist",
    cache_policy=ContentKey(fields=("model_dir", "index"), version=CONVERT_VERSION),
    persist_result=True,
    result_serializer="json",
)
def bf16_to_torch_dist(model_dir: str, index: str) -> dict[str, Any]:
    """Write the torch_dist checkpoint, in one process; at full size run `k31 convert` on many ranks before."""
    target = torch_dist_dir(Path(model_dir))
    if not (target / _FACTS).is_file():
        if target.exists():
            shutil.rmtree(target)  # ours by its name, and never finished
        _in_child(_shard, bf16_dir(Path(model_dir)), target)
    return {"directory": str(target), "files": describe_files(target)}


def _in_child(work: Any, source: Path, target: Path) -> Any:
    """A process of its own, so that its memory goes away."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, source, target).result()


def _decode(source: Path, target: Path) -> dict[str, int]:
    from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
    from k31core.convert.verify_bf16 import verify_bf16

    if not (target / "model.safetensors.index.json").is_file():
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
