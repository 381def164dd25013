"""An engine that spans nodes: one detached actor on each of its nodes starts that node's server process.

The actors have names below the run's prefix, so the run's teardown takes them, and their servers end with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from k31core.cluster.actors import NAMESPACE, AsyncHost, ClusterError, kill, names
from k31core.recipe.recipe import Recipe

_IDENTITY_S = 30.0
NODE_WORKER = ("k31core.workers.sglang_node", "SglangNodeWorker")


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What the node workers of a run are given."""

    name_prefix: str
    """Of the run's actors, e.g. `<run directory>:`."""
    recipe_json: str
    model_dir: str
    run_dir: str
    environment: Mapping[str, str]
    fingerprint: str = ""
    """An actor with another one is replaced: its recipe, code or environment is another."""


def needs_node_workers(recipe: Recipe) -> bool:
    """Whether the engine cannot be started by the one process that uses it."""
    engine = recipe.rollout.engine
    return engine.kind == "sglang" and not engine.server_urls and recipe.nodes_per_engine > 1


def start_engine_nodes(recipe: Recipe, run: EngineRun) -> tuple[str, ...]:
    """Start every node of every engine (or find it running); returns the engines' URLs, for `server_urls`.

    The servers are not up yet when this returns: who joins them waits. Raises ClusterError when there are too few
    nodes, or what a node worker raised (an SGLang that cannot serve the recipe, a port that is taken).
    """
    per = recipe.nodes_per_engine
    nodes = _nodes(recipe)
    if len(nodes) < per * recipe.num_engines:
        raise ClusterError(
            f"{recipe.num_engines} engines of {per} nodes with {recipe.cluster.gpus_per_node} GPUs each need "
            f"{per * recipe.num_engines} nodes, Ray has {len(nodes)}: {', '.join(a for a, _ in nodes) or 'none'}"
        )
    calls = []
    for engine in range(recipe.num_engines):
        members = nodes[engine * per : (engine + 1) * per]
        for rank, (_, node_id) in enumerate(members):
            calls.append(_worker(run, engine, rank, members[0][0], node_id).call.remote("start", []))
    try:
        replies: list[dict[str, Any]] = ray.get(calls, timeout=recipe.cluster.bringup_timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(
            f"the node workers of the engine did not answer within {recipe.cluster.bringup_timeout_s:g} s "
            f"(cluster.bringup_timeout_s)"
        ) from error
    return tuple(reply["url"] for reply in replies[::per])


def _nodes(recipe: Recipe) -> list[tuple[str, str]]:
    """(address, id) of the nodes with enough GPUs, in an order that is the same at every call."""
    wanted = recipe.cluster.gpus_per_node
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= wanted]
    return sorted((node["NodeManagerAddress"], node["NodeID"]) for node in alive)


def _worker(run: EngineRun, engine: int, rank: int, head: str, node_id: str) -> Any:
    name = f"{run.name_prefix}sglang-{engine}-{rank}"
    living = _living(name, run.fingerprint)
    if living is not None:
        return living
    arguments = {
        "recipe_json": run.recipe_json,
        "model_dir": run.model_dir,
        "run_dir": run.run_dir,
        "engine": engine,
        "node_rank": rank,
        "head_address": head,
    }
    host: Any = ray.remote(AsyncHost)
    return host.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=0,
        runtime_env={"env_vars": {**run.environment, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    ).remote(*NODE_WORKER, arguments, run.fingerprint)


def _living(name: str, fingerprint: str) -> Any:
    """The actor of that name when it is this run's as it is now; another one is ended."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    try:
        if ray.get(handle.identity.remote(), timeout=_IDENTITY_S)["fingerprint"] == fingerprint:
            return handle
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        pass  # dead, or it does not answer: it is replaced
    kill(name)
    return None


def node_states(name_prefix: str, *, timeout_s: float = 5.0) -> list[dict[str, Any]]:
    """What every living node worker of a run says about its server; those that do not answer in time are left out."""
    handles = [ray.get_actor(name, namespace=NAMESPACE) for name in names(f"{name_prefix}sglang-")]
    calls = [handle.call.remote("state", []) for handle in handles]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    states = []
    for call in done:
        try:
            states.append(ray.get(call))
        except ray.exceptions.RayError:
            continue  # it is gone: whoever waits for the engine is told by the lost connection
    return states


def require_servers(name_prefix: str) -> None:
    """Raise ClusterError when a server of the run has ended: node, exit code and the end of its log."""
    for state in node_states(name_prefix):
        if state["exit_code"] is not None:
            raise ClusterError(
                f"{state['what']} on {state['host']} ended with exit code {state['exit_code']}: {state['reason']} "
                f"(log: {state['log']})"
            )
