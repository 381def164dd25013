"""Stage sync: the trainer's adapter goes to the engine as a new version, and a fixed trajectory checks both sides.

    in_process, shared_files:  export into sync/step-N ──► the engine loads the directory
    cuda_ipc:                  (the base again, piece by piece) ──► handles of the trainer ranks ──► one load
    nccl:                      broadcast from trainer rank 0 ──► received beside the engine ──► handles ──► one load

`sync.transport` of the recipe chooses. The engine answers with the version it serves; another digest is an error.
"""

import json
import os
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prefect import task
from prefect.cache_policies import NO_CACHE

from k31core.checkpoint import commit as commits
from k31core.cluster.actors import wait_for
from k31core.observe.ledger import Phase
from k31core.observe.metrics import CANARY_ABS_DIFF, HOST_RSS_MB, SYNC_BYTES
from k31core.sync.handle_publisher import HandlePublisher, Handles, Released
from k31core.sync.publisher import PublishedAdapter, SyncError
from tasks.run_directory import Run


@task(name="sync", task_run_name="sync-{step:05d}", cache_policy=NO_CACHE, persist_result=False)
def sync(run: Run, step: int) -> dict[str, Any]:
    """Publish the adapter after `step` as version `step`; returns what the engine confirmed.

    Never cached: it changes the engine's memory. Raises SyncError when the engine serves other bytes than the trainer
    wrote.
    """
    with run.phase(Phase.SYNC, step) as outputs:
        by = run.recipe.sync.transport
        ours = _canary_of_trainer(run)
        if run.recipe.cluster.colocate:
            run.call_trainers("offload")  # before the engine takes its memory back
        publish = {"cuda_ipc": publish_handles, "nccl": publish_broadcast}.get(by, publish_files)
        published = publish(run, step)
        metrics: dict[str, Any] = {SYNC_BYTES: published.bytes}
        metrics.update(_canary(run, ours))
        metrics[HOST_RSS_MB] = _resident_mb(run)
        outputs.update(digest=published.digest, transport=by, metrics=metrics)
    return dict(outputs)


def publish_files(run: Run, step: int) -> PublishedAdapter:
    """Through a directory. Raises SyncError when the engine confirms other bytes than the trainer wrote."""
    began = time.perf_counter()
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
    size = sum(entry["size"] for entry in manifest["files"])
    return PublishedAdapter(step, expected, size, time.perf_counter() - began)


def publish_handles(run: Run, step: int) -> PublishedAdapter:
    """By handles of the trainer ranks' memory, after the base where the engine keeps no copy of it."""
    if run.recipe.sync.resend_base:
        send_base(run)
    if run.recipe.cluster.colocate:
        run.call_engine("wake")
    publisher = HandlePublisher(_Trainers(run), _EngineSink(run), lambda _: _digest(run))
    return _finish(publisher.publish(run.store.sync_dir(step), step))


def publish_broadcast(run: Run, step: int) -> PublishedAdapter:
    """By a broadcast from trainer rank 0 to a receiver beside the engine."""
    began = time.perf_counter()
    assert run.engine is not None
    if run.recipe.cluster.colocate:
        run.call_engine("wake")
    digest = _digest(run)
    meeting = run.store.root / f".sync-{uuid.uuid4().hex[:8]}"
    try:
        workers = [*run.trainers, run.engine]
        calls = [trainer.submit("sync", "broadcast", step, str(meeting), 1) for trainer in run.trainers]
        calls.append(run.engine.submit("sync", "receive", str(meeting), step, digest))
        *sent, received = wait_for(workers, calls, "sync", run.recipe.cluster.phase_timeout_s)
    finally:
        meeting.unlink(missing_ok=True)
    if received["held"]:
        raise SyncError(f"version {step}: the receiver kept {received['held']} bytes: restart the engine's worker")
    return PublishedAdapter(step, digest, max(sent), time.perf_counter() - began)


def send_base(run: Run) -> None:
    """The frozen base once more, a piece at a time: the trainer ranks put it together, every server copies it."""
    run.call_engine("sync", "begin_base")
    first = True
    while True:
        payloads = [payload for payload in run.call_trainers("sync", "next_base", first) if payload is not None]
        if not payloads:
            break
        run.call_engine("sync", "base", payloads[: _engine_ranks(run)])
        first = False
    run.call_engine("sync", "end_base")


def export_adapter(run: Run, step: int) -> dict[str, Any]:
    """Write the trainer's adapter, without optimizer, as `sync/step-N`; returns the commit's manifest."""
    final = run.store.sync_dir(step)
    facts: dict[str, Any] = {"step": step, "run_id": run.store.run_id}
    with commits.staged(final, "sync", facts) as staging:
        facts["adapter_digest"] = run.call_trainers("export", step, str(staging), False)[0]["adapter_digest"]
    return commits.read_manifest(final)


class _Trainers:
    """The trainer ranks as `HandlePublisher` sees them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def export(self, version: int) -> Handles:
        replies = self._run.call_trainers("sync", "handles", version)
        payloads = [reply["payload"] for reply in replies if reply["payload"] is not None]
        if len(payloads) != _engine_ranks(self._run):
            raise SyncError(
                f"{len(payloads)} trainer ranks share a card with an engine rank, the engines have "
                f"{_engine_ranks(self._run)} ranks: use sync.transport 'shared_files'"
            )
        return Handles(payloads, replies[0]["checksums"])

    async def release(self, version: int) -> Released:
        replies = self._run.call_trainers("sync", "release", version)
        return Released(sum(r["freed"] for r in replies), sum(r["held"] for r in replies))


class _EngineSink:
    """The engine as `HandlePublisher` sees it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def load_adapter_tensors(
        self, payloads: Sequence[str], version: int, digest: str, checksums: Mapping[str, str] | None = None
    ) -> None:
        self._run.call_engine("sync", "handles", list(payloads), version, digest, checksums)


def _engine_ranks(run: Run) -> int:
    return run.recipe.rollout.engine.tp_size * run.recipe.num_engines


def _digest(run: Run) -> str:
    return str(run.call_trainers("digest")[0])


def _finish[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose awaits are all calls that block: it never suspends, so it needs no event loop (one would
    take Ctrl-C for itself)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("the publisher waited for something that only an event loop can bring")


def canary_tokens(vocab_size: int, length: int) -> list[int]:
    """A fixed sequence over the whole vocabulary: the same on every machine and in every run."""
    return [(7 * position + 3) % vocab_size for position in range(length)]


def _canary_of_trainer(run: Run) -> Sequence[float]:
    """The trainer's log-probs of the fixed trajectory, while its weights are on the card; empty when it is off."""
    length = run.recipe.sync.canary_tokens
    if length < 2:
        return ()
    if run.recipe.cluster.colocate:
        run.call_engine("sleep")
        run.call_trainers("onload")
    scores: Sequence[float] = run.call_trainers("score", _canary_tokens(run))[0]
    return scores


def _canary(run: Run, ours: Sequence[float]) -> dict[str, float]:
    if not ours:
        return {}
    theirs: Sequence[float] = run.call_engine("score", _canary_tokens(run))
    if len(ours) != len(theirs):
        raise SyncError(f"the canary has {len(ours)} log-probs in the trainer, {len(theirs)} in the engine")
    return {CANARY_ABS_DIFF: max(abs(a - b) for a, b in zip(ours, theirs))}


def _canary_tokens(run: Run) -> list[int]:
    assert run.prepared is not None
    return canary_tokens(_vocab_size(run.prepared.model_dir), run.recipe.sync.canary_tokens)


def _vocab_size(model_dir: Path) -> int:
    config = json.loads((model_dir / "config.json").read_bytes())
    return int(config.get("text_config", config)["vocab_size"])


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
