"""Stage cluster: placement group, detached actors, and what a resumed run finds in their memory."""

import hashlib
import json
import os
import signal
import threading
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.checkpoint.commit import set_aside
from k31core.checkpoint.lock import holder
from k31core.cluster import actors
from k31core.cluster.actors import WorkerLostError, WorkerSpec
from k31core.cluster.engine_nodes import EngineRun, needs_node_workers, require_servers, start_engine_nodes
from k31core.cluster.preflight import stale_placement_groups
from k31core.observe.jsonl import write_atomic
from k31core.observe.ledger import Phase
from k31core.recipe.load import override_recipe
from tasks.preflight import check_cluster, check_network
from tasks.run_directory import Position, Run

__all__ = ["WorkerLostError", "connect", "connect_engine", "connect_ray", "release"]

GROUP_PREFIX = "k31:"
WORKERS_FILE = "workers.json"

ROLLOUT_WORKER = ("k31core.workers.rollout", "RolloutWorker")
TRAIN_WORKER = ("k31core.workers.train", "TrainWorker")


@task(name="cluster", task_run_name="cluster", cache_policy=NO_CACHE, persist_result=False)
def connect(run: Run) -> None:
    """Place the workers, start or re-attach them, and bring trainer and position to the newest valid commit.

    An attached trainer is used as it is only when the step in its memory is the ledger's last trained step; otherwise
    it is restored from the newest valid save. Steps after that save are trained again from their committed rollouts.
    """
    connect_ray(run)
    recipe = run.recipe
    trainer_specs, engine_spec, group = _place(run)
    if needs_node_workers(recipe):
        engine_spec = _join_engine_nodes(run, engine_spec)
    busy_s = min(30.0, recipe.cluster.phase_timeout_s)
    trainers = _attach_or_begin_ranks(trainer_specs, group, busy_s)
    pending = [*trainers, actors.attach_or_begin(engine_spec, group, busy_s=busy_s)]
    workers = [actors.finish(item, timeout_s=recipe.cluster.bringup_timeout_s) for item in pending]
    run.trainers, run.engine = workers[:-1], workers[-1]
    _replace_busy_engine(run, group)
    _write_worker_pids(run)
    _start_new(run)
    check_network(run)
    run.position = _position(run)


@task(name="engine", task_run_name="engine", cache_policy=NO_CACHE, persist_result=False)
def connect_engine(run: Run) -> None:
    """Start the engine alone, for an evaluation, in the place that it has in training.

    Workers that an earlier attempt left are ended: the run goes on from its last save.
    """
    connect_ray(run)
    release(run)
    _, engine_spec, group = _place(run)
    engine_spec = replace(engine_spec, arguments={**engine_spec.arguments, "evaluate_only": True})
    if needs_node_workers(run.recipe):
        engine_spec = _join_engine_nodes(run, engine_spec)
    pending = actors.attach_or_begin(engine_spec, group)
    run.engine = actors.finish(pending, timeout_s=run.recipe.cluster.bringup_timeout_s)
    _write_worker_pids(run)
    _start_new(run)


def _place(run: Run) -> tuple[list[WorkerSpec], WorkerSpec, Any]:
    """(trainer ranks, engine, their placement group), after a look at the cluster.

    Workers that live on are replaced when what the look found changes their environment (a port is left out).
    """
    run.worker_environment = check_cluster(run)
    trainer_specs, engine_spec = worker_specs(run)
    bundles = [_bundle(spec) for spec in [*trainer_specs, engine_spec]]
    for left in release_leftovers(run):
        get_run_logger().info("took down the workers of %s, which nobody works on", left)
    own, timeout_s = group_name(run.store.root), run.recipe.cluster.bringup_timeout_s
    try:
        group = actors.ensure_placement_group(own, bundles, spread=False, timeout_s=timeout_s)
    except actors.ClusterError as error:
        others = stale_placement_groups(dict.fromkeys(actors.group_names(), "living"), str(run.store.root))
        raise actors.ClusterError("\n".join([str(error), *(f"  {other}" for other in others)])) from error
    return trainer_specs, engine_spec, group


def connect_ray(run: Run) -> None:
    """Attach this process to the Ray cluster named by RAY_ADDRESS; a no-op when it is attached."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise actors.ClusterError("RAY_ADDRESS is not set: `k31 up` starts a local head and prints what to export")
    local = {"_node_ip_address": "127.0.0.1"} if address.startswith("127.") else {}
    on_terminate = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, namespace=actors.NAMESPACE, log_to_driver=False, logging_level="warning", **local)
    if threading.current_thread() is threading.main_thread():
        # Ray takes SIGTERM for itself and aborts; Prefect's handler turns it into an interruption that we can act on
        signal.signal(signal.SIGTERM, on_terminate)
    run.cleanup.append(ray.shutdown)


def group_name(root: Path) -> str:
    """Name of the placement group of the run directory `root`."""
    return f"{GROUP_PREFIX}{root}"


def worker_names(root: Path, world_size: int) -> list[str]:
    """Names of the actors of the run directory `root`."""
    return [f"{root}:trainer-{rank}" for rank in range(world_size)] + [f"{root}:engine"]


def release(run: Run) -> None:
    """The run has ended: its actors and their place go. After a fault they stay, and the next attempt attaches."""
    actors.tear_down(f"{run.store.root}:", group_name(run.store.root))
    run.trainers, run.engine = [], None


def release_leftovers(run: Run) -> list[str]:
    """Take down the actors of other runs that nobody works on; returns their run directories.

    A run that is continued later starts new actors and restores its last save.
    """
    left = []
    for name in actors.group_names():
        root = Path(name.removeprefix(GROUP_PREFIX))
        if not name.startswith(GROUP_PREFIX) or root == run.store.root or holder(root / "lock") is not None:
            continue
        actors.tear_down(f"{root}:", name)
        left.append(str(root))
    return left


def worker_specs(run: Run) -> tuple[list[WorkerSpec], WorkerSpec]:
    """How the trainer ranks and the engine are started."""
    assert run.prepared is not None
    recipe = run.recipe
    text = recipe.model_dump_json()
    world_size = recipe.train.parallel.world_size
    run_dir, model_dir = str(run.store.root), str(run.prepared.model_dir)
    # one rendezvous file a bring-up: a stale one would make new ranks join a dead group
    init_method = f"file://{run.store.root}/.rendezvous-{uuid.uuid4().hex[:8]}" if world_size > 1 else ""
    same = [text, run_dir, model_dir, sorted(run.worker_environment.items()), code_digest()]
    fingerprint = hashlib.sha256(json.dumps(same).encode()).hexdigest()
    names = worker_names(run.store.root, world_size)
    shares_gpu = recipe.cluster.colocate and recipe.train.device == "cuda"
    trainers = [
        WorkerSpec(
            name=names[rank],
            module=TRAIN_WORKER[0],
            class_name=TRAIN_WORKER[1],
            arguments={
                "recipe_json": text,
                "run_dir": run_dir,
                "model_dir": model_dir,
                "rank": rank,
                "world_size": world_size,
                "init_method": init_method,
            },
            fingerprint=fingerprint,
            bundle=rank,
            num_cpus=recipe.cluster.cpus_per_trainer,
            num_gpus=(0.5 if shares_gpu else 1.0) if recipe.train.device == "cuda" else 0.0,
            environment=_environment(run, recipe.train.threads),
        )
        for rank in range(world_size)
    ]
    engine = WorkerSpec(
        name=names[-1],
        module=ROLLOUT_WORKER[0],
        class_name=ROLLOUT_WORKER[1],
        arguments={
            "recipe_json": text,
            "run_dir": run_dir,
            "model_dir": model_dir,
            "data_dir": str(run.prepared.data_dir),
        },
        fingerprint=fingerprint,
        bundle=world_size,
        num_cpus=recipe.cluster.cpus_per_engine,
        # it asks Ray for no card of its own, and its servers see all of the node
        environment={**_environment(run, recipe.rollout.engine.threads), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        concurrent=True,
    )
    return trainers, engine


def _join_engine_nodes(run: Run, spec: WorkerSpec) -> WorkerSpec:
    """Start the engine's server process on each of its nodes; the rollout worker joins them by URL."""
    arguments = spec.arguments
    engine_run = EngineRun(
        name_prefix=f"{run.store.root}:",
        recipe_json=arguments["recipe_json"],
        model_dir=arguments["model_dir"],
        run_dir=arguments["run_dir"],
        environment=spec.environment,
        fingerprint=spec.fingerprint,
    )
    urls = start_engine_nodes(run.recipe, engine_run)
    joined = override_recipe(run.recipe, [f"rollout.engine.server_urls={list(urls)}"])
    return replace(spec, arguments={**arguments, "recipe_json": joined.model_dump_json()})


def code_digest() -> str:
    """Digest of this package's sources: an actor of another version of the code is never attached to."""
    root = Path(actors.__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _environment(run: Run, threads: int) -> dict[str, str]:
    """Variables of a worker process. Thread counts are part of the recipe: bits depend on them."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1" if run.recipe.train.device == "cpu" else "0",
        **run.recipe.env.variables,
        **run.worker_environment,
    }


def _bundle(spec: WorkerSpec) -> dict[str, float]:
    bundle = {"CPU": spec.num_cpus}
    if spec.num_gpus:
        bundle["GPU"] = spec.num_gpus
    return bundle


def _attach_or_begin_ranks(specs: list[WorkerSpec], group: Any, busy_s: float) -> list[actors.Pending]:
    """All ranks attached, or all new: a living rank of a broken process group is of no use."""
    attached = actors.attach_together(specs, busy_s=busy_s)
    if attached is not None:
        return attached
    actors.kill_all([spec.name for spec in specs])
    return [actors.Pending(spec, actors.start(spec, group), attached=False) for spec in specs]


def _replace_busy_engine(run: Run, group: Any) -> None:
    """An attached engine that still works for a dead flow run is replaced: its results would go nowhere."""
    assert run.engine is not None
    if not run.engine.attached:
        return
    health: dict[str, Any] = run.engine.call("health", timeout_s=30.0)
    if health.get("alive", True) and not health.get("running") and not health.get("waiting"):
        return
    actors.kill(run.engine.spec.name)
    pending = actors.attach_or_begin(run.engine.spec, group)
    run.engine = actors.finish(pending, timeout_s=run.recipe.cluster.bringup_timeout_s)


def _write_worker_pids(run: Run) -> None:
    """Where the workers live, for `k31 status` and for people with a debugger; never read to decide anything."""
    assert run.engine is not None
    record = {f"trainer-{rank}": worker.pid for rank, worker in enumerate(run.trainers)}
    record |= {"engine": run.engine.pid, "flow": os.getpid()}
    write_atomic(run.store.root / WORKERS_FILE, json.dumps(record).encode())


def _start_new(run: Run) -> None:
    """Load the model in every worker that is new, all at once."""
    assert run.engine is not None
    new = [worker for worker in [*run.trainers, run.engine] if not worker.attached]
    if run.recipe.cluster.colocate and run.recipe.train.device == "cuda":
        # the engine fills what is free on the cards when it starts
        if run.engine.attached:
            run.call_engine("sleep")
        if run.trainers and not run.trainers[0].attached:
            actors.call_together(run.trainers, "start", timeout_s=run.recipe.rollout.engine.startup_timeout_s)
        if run.trainers:
            run.call_trainers("offload")
        new = [worker for worker in new if worker is run.engine]
    calls = [worker.submit("start") for worker in new]
    timeout_s = run.recipe.rollout.engine.startup_timeout_s
    prefix = f"{run.store.root}:"
    watch = partial(require_servers, prefix) if needs_node_workers(run.recipe) else None
    actors.wait_for(new, calls, "start", timeout_s, watch)


def _position(run: Run) -> Position:
    log = get_run_logger()
    search = run.store.latest_valid_commit()
    for directory, why in search.rejected:
        aside = set_aside(directory, "bad")  # its bytes stay for a look; it no longer counts as a save
        log.warning("save %s is not valid and is passed over (now %s): %s", directory.name, aside.name, why)
    saved = search.commit.step if search.commit else 0
    last = run.store.ledger.last_step(Phase.TRAIN)
    incarnation = "-".join(f"{worker.pid}" for worker in run.trainers)
    if all(worker.attached for worker in run.trainers) and last >= saved:
        steps = run.call_trainers("step")
        if all(step == last for step in steps):
            return Position(last, saved, _cursor(run, last, search), f"{incarnation}-{_last_restore(run)}")
    source = str(search.commit.directory) if search.commit else None
    with run.phase(Phase.RESUME, saved, {"from": source, "ledger_step": last}) as outputs:
        replies = run.call_trainers("restore", source)
        outputs.update(restored=replies[0].get("restored"), not_restored=replies[0].get("not_restored"))
        outputs["rejected"] = [why for _, why in search.rejected]
    if source:
        log.info("restored from %s: %s", source, replies[0].get("restored"))
        if replies[0].get("not_restored"):
            log.warning("not restored: %s", replies[0]["not_restored"])
    return Position(saved, saved, _cursor(run, saved, search), f"{incarnation}-{_last_restore(run)}")


def _last_restore(run: Run) -> int:
    record = run.store.ledger.last(Phase.RESUME)
    return int(record["seq"]) if record else 0


def _cursor(run: Run, step: int, search: Any) -> Any:
    """The data cursor after `step`: from the ledger of that rollout, or from the save where the ledger is shorter."""
    if step == 0:
        return None
    record = run.store.ledger.last(Phase.ROLLOUT, step)
    if record is not None:
        return record["outputs"]["cursor"]
    return search.commit.facts["cursor"]
