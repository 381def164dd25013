"""Stage sync: the trainer's adapter goes to the engine as a new version, and a fixed trajectory checks both sides."""

import json
import os
from collections.abc import Sequence
from typing import Any

import psutil
from prefect import task
from prefect.cache_policies import NO_CACHE

from k31core.checkpoint import commit as commits
from k31core.observe.ledger import Phase
from k31core.observe.metrics import CANARY_ABS_DIFF, HOST_RSS_MB, SYNC_BYTES
from k31core.sync.publisher import SyncError
from tasks.run_directory import Run


@task(name="sync", task_run_name="sync-{step:05d}", cache_policy=NO_CACHE, persist_result=False)
def sync(run: Run, step: int) -> dict[str, Any]:
    """Publish the adapter after `step` as version `step`; returns what the engine confirmed.

    Never cached: it changes the engine's memory. Raises SyncError when the engine serves other bytes than the trainer
    wrote.
    """
    with run.phase(Phase.SYNC, step) as outputs:
        manifest = export_adapter(run, step)
        if run.recipe.cluster.colocate:
            run.call_engine("wake")
        directory = run.store.sync_dir(step)
        reply = run.call_engine("load_adapter", str(directory), step)
        expected = manifest["facts"]["adapter_digest"]
        if reply["digest"] != expected:
            raise SyncError(
                f"version {step}: the engine confirmed adapter {reply['digest'][:16]}, the trainer wrote "
                f"{expected[:16]} into {directory}; the engine must not generate with it"
            )
        metrics: dict[str, Any] = {SYNC_BYTES: sum(entry["size"] for entry in manifest["files"])}
        metrics.update(_canary(run))
        metrics[HOST_RSS_MB] = _resident_mb(run)
        outputs.update(digest=expected, metrics=metrics)
    return dict(outputs)


def export_adapter(run: Run, step: int) -> dict[str, Any]:
    """Write the trainer's adapter, without optimizer, as `sync/step-N`; returns the commit's manifest."""
    final = run.store.sync_dir(step)
    facts: dict[str, Any] = {"step": step, "run_id": run.store.run_id}
    with commits.staged(final, "sync", facts) as staging:
        facts["adapter_digest"] = run.call_trainers("export", step, str(staging), False)[0]["adapter_digest"]
    return commits.read_manifest(final)


def canary_tokens(vocab_size: int, length: int) -> list[int]:
    """A fixed sequence over the whole vocabulary: the same on every machine and in every run."""
    return [(7 * position + 3) % vocab_size for position in range(length)]


def _canary(run: Run) -> dict[str, float]:
    length = run.recipe.sync.canary_tokens
    if length < 2:
        return {}
    assert run.prepared is not None
    config = json.loads((run.prepared.model_dir / "config.json").read_bytes())
    tokens = canary_tokens(int(config.get("text_config", config)["vocab_size"]), length)
    ours: Sequence[float] = run.call_trainers("score", tokens)[0]
    theirs: Sequence[float] = run.call_engine("score", tokens)
    if len(ours) != len(theirs):
        raise SyncError(f"the canary has {len(ours)} log-probs in the trainer, {len(theirs)} in the engine")
    return {CANARY_ABS_DIFF: max(abs(a - b) for a, b in zip(ours, theirs))}


def _resident_mb(run: Run) -> float:
    """Resident memory of the workers that run on this machine, in MiB."""
    pids = [worker.pid for worker in run.trainers] + ([run.engine.pid] if run.engine else []) + [os.getpid()]
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue  # on another node
    return round(total / 1024**2, 1)
