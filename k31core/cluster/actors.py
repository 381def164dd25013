"""Detached named actors that host a plain worker class, started by module name.

The driver never imports the worker's module (no torch here): a small host class does, inside the actor. Actors live
in a detached placement group and survive the flow process, so a resumed flow can attach to them; what an attached
actor holds in memory is checked against the ledger before it is used (see `tasks/cluster.py`).
"""

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from k31core.cluster import calls
from k31core.cluster.calls import GRACE_S, ClusterError, Watch, WorkerLostError

__all__ = ["NAMESPACE", "ClusterError", "Worker", "WorkerLostError", "WorkerSpec"]

NAMESPACE = "k31"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker class and how to start it."""

    name: str
    """Unique in the namespace: `<run directory>:trainer-0`."""
    module: str
    class_name: str
    arguments: Mapping[str, Any]
    fingerprint: str
    """Changes with everything an old actor must not be re-used over (recipe, arguments, code version)."""
    bundle: int
    num_cpus: float
    num_gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    concurrent: bool = False
    """True for workers with async methods: several calls run at once in one event loop."""


class Host:
    """Hosts a worker whose methods run one at a time, in the actor's main thread."""

    def __init__(self, module: str, class_name: str, arguments: Mapping[str, Any], fingerprint: str) -> None:
        self._worker = getattr(importlib.import_module(module), class_name)(**arguments)
        self._fingerprint = fingerprint
        self._started = False

    def identity(self) -> dict[str, Any]:
        """Who this is."""
        return {"fingerprint": self._fingerprint, "pid": os.getpid(), "started": self._started}

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the worker."""
        result = getattr(self._worker, method)(*arguments)
        self._started = self._started or method == "start"
        return result


class AsyncHost:
    """Hosts a worker with async methods; calls run at once in one event loop."""

    def __init__(self, module: str, class_name: str, arguments: Mapping[str, Any], fingerprint: str) -> None:
        self._worker = getattr(importlib.import_module(module), class_name)(**arguments)
        self._fingerprint = fingerprint
        self._started = False

    async def identity(self) -> dict[str, Any]:
        """Who this is."""
        return {"fingerprint": self._fingerprint, "pid": os.getpid(), "started": self._started}

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the worker and wait for it."""
        result = getattr(self._worker, method)(*arguments)
        result = await result if inspect.isawaitable(result) else result
        self._started = self._started or method == "start"
        return result


@dataclass(frozen=True, slots=True)
class Worker:
    """A handle on a hosted worker."""

    spec: WorkerSpec
    handle: ActorHandle
    pid: int
    attached: bool
    """True when the actor was already there (its memory is older than this flow run)."""

    def submit(self, method: str, *arguments: Any) -> ray.ObjectRef:
        """Start a call."""
        return self.handle.call.remote(method, arguments)

    def call(self, method: str, *arguments: Any, timeout_s: float, watch: Watch | None = None) -> Any:
        """Call and wait. Raises WorkerLostError when the actor is gone or does not answer in time."""
        return wait_for([self], [self.submit(method, *arguments)], method, timeout_s, watch)[0]


def wait_for(
    workers: Sequence[Worker],
    refs: Sequence[ray.ObjectRef],
    method: str,
    timeout_s: float,
    watch: Watch | None = None,
) -> list[Any]:
    """Results of one call on each of some independent workers; see `calls.wait_for`."""
    return calls.wait_for([worker.spec.name for worker in workers], refs, method, timeout_s, watch)


def call_together(
    workers: Sequence[Worker], method: str, *arguments: Any, timeout_s: float, watch: Watch | None = None
) -> list[Any]:
    """The same call on every rank of one process group; results by rank.

    A rank that dies or fails alone ends it for all: those that are still inside the call wait for it in a collective
    and would do so until the group's timeout. The group is taken down then, and `connect` starts a new one. Raises
    WorkerLostError, or the rank's own error.
    """
    refs = [worker.submit(method, *arguments) for worker in workers]
    found = calls.collect(refs, timeout_s=timeout_s, grace_s=GRACE_S, watch=watch)
    if found.whole:
        return [found.results[rank] for rank in range(len(workers))]
    names = [worker.spec.name for worker in workers]
    error = calls.failure(found, names, method, timeout_s)
    if len(workers) > 1 and found.broken:
        kill_all(names)
        error.add_note(f"the {len(workers)} ranks were taken down: one process group")
    raise error


def ensure_placement_group(name: str, bundles: Sequence[Mapping[str, float]], *, spread: bool, timeout_s: float) -> Any:
    """The detached placement group `name`, made when it is not there. Raises ClusterError after the deadline."""
    wanted = [dict(bundle) for bundle in bundles]
    group = _existing_group(name)
    if group is not None and [dict(b) for b in group.bundle_specs] != wanted:
        remove_placement_group(group)
        group = None
    if group is None:
        strategy = "STRICT_SPREAD" if spread else "PACK"
        group = placement_group(wanted, strategy=strategy, name=name, lifetime="detached")
    if not group.wait(timeout_seconds=timeout_s):
        remove_placement_group(group)
        nodes = [
            f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPUs, "
            f"{node['Resources'].get('GPU', 0):g} GPUs{'' if node['Alive'] else ' (dead)'}"
            for node in ray.nodes()
        ]
        free = ray.available_resources()
        raise ClusterError(
            f"Ray cannot place {wanted} within {timeout_s:.0f} s (cluster.bringup_timeout_s). "
            f"Nodes: {'; '.join(nodes)}. Free now: {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs. "
            f"Another run may hold them (`k31 status`)."
        )
    return group


def _existing_group(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Pending:
    """An actor that was found or is being started."""

    spec: WorkerSpec
    handle: ActorHandle
    attached: bool


def attach_or_begin(spec: WorkerSpec, group: PlacementGroup, *, busy_s: float = 30.0) -> Pending:
    """Attach to `spec.name` when it answers within `busy_s` and has this fingerprint; otherwise begin a new one."""
    handle = _existing_actor(spec.name)
    if handle is not None:
        identity = _identity(handle, timeout_s=busy_s)
        if identity is not None and _is_ready(identity, spec):
            return Pending(spec, handle, attached=True)
        kill(spec.name)
    return Pending(spec, start(spec, group), attached=False)


def _is_ready(identity: Mapping[str, Any], spec: WorkerSpec) -> bool:
    """Whether an actor is the one of `spec` and its `start` has ended: the flow run that made it may have died before
    it called `start`, and nobody would."""
    return bool(identity["fingerprint"] == spec.fingerprint and identity["started"])


def attach_together(specs: Sequence[WorkerSpec], *, busy_s: float) -> list[Pending] | None:
    """Attach to all of `specs`, ranks of one process group; None when one of them is missing, dead, of another
    fingerprint, or does not answer within `busy_s`: then none is of use."""
    handles = [handle for spec in specs if (handle := _existing_actor(spec.name)) is not None]
    if len(handles) < len(specs):
        return None
    found = calls.collect([handle.identity.remote() for handle in handles], timeout_s=busy_s)
    if not found.whole or not all(_is_ready(found.results[i], spec) for i, spec in enumerate(specs)):
        return None
    return [Pending(spec, handle, attached=True) for spec, handle in zip(specs, handles, strict=True)]


def finish(pending: Pending, *, timeout_s: float) -> Worker:
    """Wait until the actor answers. Raises ClusterError after the deadline, or when its class cannot be made."""
    spec = pending.spec
    try:
        identity = ray.get(pending.handle.identity.remote(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        kill(spec.name)
        raise ClusterError(f"{spec.name} did not start within {timeout_s:.0f} s (cluster.bringup_timeout_s)") from error
    except ray.exceptions.RayActorError as error:
        raise ClusterError(f"{spec.name} did not start: {error}") from error
    return Worker(spec, pending.handle, identity["pid"], attached=pending.attached)


def start(spec: WorkerSpec, group: PlacementGroup) -> ActorHandle:
    """Start the actor; it is not ready when this returns."""
    options: dict[str, Any] = {
        "name": spec.name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.num_gpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": dict(spec.environment)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=spec.bundle),
    }
    host: Any = ray.remote(Host)
    if spec.concurrent:
        host, options["max_concurrency"] = ray.remote(AsyncHost), 64
    return host.options(**options).remote(spec.module, spec.class_name, dict(spec.arguments), spec.fingerprint)


def _existing_actor(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _identity(handle: ActorHandle, *, timeout_s: float) -> dict[str, Any] | None:
    """What the actor says about itself; None when it is dead, or busy for longer than the timeout."""
    try:
        return dict(ray.get(handle.identity.remote(), timeout=timeout_s))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def kill(name: str) -> bool:
    """Kill an actor and wait until its name is free; False when there was none."""
    handle = _existing_actor(name)
    if handle is None:
        return False
    ray.kill(handle, no_restart=True)
    return _wait_until_gone(name, handle)


def kill_all(names: Sequence[str]) -> None:
    """Kill some actors at once and wait until their names are free; those that are gone already do not matter."""
    living = {name: handle for name in names if (handle := _existing_actor(name)) is not None}
    for handle in living.values():
        ray.kill(handle, no_restart=True)
    for name, handle in living.items():
        _wait_until_gone(name, handle)


def _wait_until_gone(name: str, handle: ActorHandle) -> bool:
    for _ in range(100):
        if _existing_actor(name) is None:
            return True
        ray.wait([handle.identity.remote()], timeout=0.1)
    raise ClusterError(f"actor {name} does not go away after it was killed")


def tear_down(name_prefix: str, group_name: str) -> None:
    """Kill every actor whose name begins with `name_prefix` and remove the placement group."""
    kill_all(names(name_prefix))
    group = _existing_group(group_name)
    if group is not None:
        remove_placement_group(group)


def names(prefix: str) -> list[str]:
    """Names of the living actors that begin with `prefix`."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [e["name"] for e in found if e["namespace"] == NAMESPACE and e["name"].startswith(prefix)]


def group_names() -> list[str]:
    """Names of the placement groups that exist (those being removed left out)."""
    return [entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]
