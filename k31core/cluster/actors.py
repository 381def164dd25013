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

NAMESPACE = "k31"


class ClusterError(RuntimeError):
    """Ray could not give what the recipe asks for, or an actor did not start: says what there is."""


class WorkerLostError(ClusterError):
    """An actor died or did not answer in time; the run resumes from its last commit with a new one."""


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

    def identity(self) -> dict[str, Any]:
        """Who this is."""
        return {"fingerprint": self._fingerprint, "pid": os.getpid()}

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)


class AsyncHost:
    """Hosts a worker with async methods; calls run at once in one event loop."""

    def __init__(self, module: str, class_name: str, arguments: Mapping[str, Any], fingerprint: str) -> None:
        self._worker = getattr(importlib.import_module(module), class_name)(**arguments)
        self._fingerprint = fingerprint

    async def identity(self) -> dict[str, Any]:
        """Who this is."""
        return {"fingerprint": self._fingerprint, "pid": os.getpid()}

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the worker and wait for it."""
        result = getattr(self._worker, method)(*arguments)
        return await result if inspect.isawaitable(result) else result


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

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call and wait. Raises WorkerLostError when the actor is gone or does not answer in time."""
        return wait_for([self], [self.submit(method, *arguments)], method, timeout_s)[0]


def wait_for(workers: Sequence[Worker], calls: Sequence[ray.ObjectRef], method: str, timeout_s: float) -> list[Any]:
    """Results of one call on each worker. A lost worker is WorkerLostError; the worker's own error is raised as is."""
    names = ", ".join(worker.spec.name for worker in workers)
    try:
        return list(ray.get(list(calls), timeout=timeout_s))
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerLostError(
            f"{names}: `{method}` has not ended after {timeout_s:.0f} s (cluster.phase_timeout_s): taken for hung"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None
    except SystemError as error:  # a signal's exception (a cancel) that was raised inside Ray's C code comes wrapped
        raise error.__cause__ or error from None
    except ray.exceptions.RayActorError as error:
        raise WorkerLostError(f"{names}: the process died during `{method}`: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


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
        if identity is not None and identity["fingerprint"] == spec.fingerprint:
            return Pending(spec, handle, attached=True)
        kill(spec.name)
    return Pending(spec, start(spec, group), attached=False)


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
    for _ in range(100):
        if _existing_actor(name) is None:
            return True
        ray.wait([handle.identity.remote()], timeout=0.1)
    raise ClusterError(f"actor {name} does not go away after it was killed")


def tear_down(name_prefix: str, group_name: str) -> None:
    """Kill every actor whose name begins with `name_prefix` and remove the placement group."""
    for name in names(name_prefix):
        kill(name)
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
