"""From a recipe to a running engine: start or join the servers, compare them with the recipe, hand over."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from k31core.recipe.load import ResolvedRecipe
from k31core.recipe.model import DSA_FIELDS
from k31core.recipe.recipe import Recipe
from k31core.rollout.engine import EngineError
from k31core.rollout.engines.sglang.adapter_files import expected_factors
from k31core.rollout.engines.sglang.client import SglangClient
from k31core.rollout.engines.sglang.engine import SglangEngine, SglangOptions
from k31core.rollout.engines.sglang.flags import (
    Place,
    differences,
    server_args,
    server_environment,
    server_host,
    server_port,
)
from k31core.rollout.engines.sglang.launch import ServerProcess, require_free_port
from k31core.rollout.engines.sglang.payload import ModelShape
from k31core.rollout.engines.sglang.versions import Abilities, abilities_of_server, inspect_tree, require_abilities


async def open_sglang(resolved: ResolvedRecipe, model_dir: Path, log_dir: Path | None = None) -> SglangEngine:
    """Start the servers on this machine, or join those of `rollout.engine.server_urls`.

    Raises EngineError (SglangVersionError, LaunchError, ServerError) naming what is wrong, within the recipe's
    `startup_timeout_s`. An engine that spans several nodes is started node by node with `start_node` and joined.
    """
    recipe = resolved.recipe
    text = read_text_config(model_dir)
    engine = recipe.rollout.engine
    processes: list[ServerProcess] = []
    clients: list[SglangClient] = []
    try:
        if engine.server_urls:
            urls = list(engine.server_urls)
        else:
            urls = _start_here(recipe, model_dir, log_dir or Path.cwd() / "logs", processes)
        for url in urls:
            clients.append(
                SglangClient(
                    url,
                    timeout_s=engine.request_timeout_s,
                    retries=engine.request_retries,
                    max_concurrent=engine.max_concurrent_requests,
                )
            )
        for index, client in enumerate(clients):
            if processes:
                await processes[index].wait_healthy(client, engine.startup_timeout_s)
            else:
                await _wait_for_answer(client, engine.startup_timeout_s)
        # a tree that we can read says more than the version of a running server
        tree = inspect_tree(engine.sglang_path) if processes or engine.sglang_path else None
        has, base_version = await _compare(recipe, clients, tree)
        return SglangEngine(clients, processes, _options(recipe, text, has), base_version)
    except BaseException:
        for client in clients:
            await client.close()
        for process in processes:
            await process.stop()
        raise


def start_node(recipe: Recipe, model_dir: Path, place: Place, log: Path, card: str | None = None) -> ServerProcess:
    """Start this node's part of an engine that spans nodes; every node runs this, the first one answers HTTP."""
    has = inspect_tree(recipe.rollout.engine.sglang_path)
    require_abilities(recipe, has)
    if place.node_rank == 0:
        require_free_port(server_host(recipe, place), server_port(recipe, place.engine))
    args = server_args(recipe, str(model_dir), has, place)
    what = f"SGLang engine {place.engine}, node {place.node_rank}"
    environment = server_environment(recipe, os.environ, card)
    return ServerProcess.start(args, environment, log, what=what, python=recipe.rollout.engine.python)


def read_text_config(model_dir: Path) -> dict[str, Any]:
    """`text_config` of the checkpoint. Raises EngineError naming the file."""
    path = model_dir / "config.json"
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text_config"]
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{path}: no readable text_config ({error}); is this the checkpoint?") from error
    if not isinstance(text, dict):
        raise EngineError(f"{path}: text_config is a {type(text).__name__}, expected an object")
    return text


def _start_here(recipe: Recipe, model_dir: Path, log_dir: Path, processes: list[ServerProcess]) -> list[str]:
    nodes = recipe.nodes_per_engine
    if nodes > 1:
        raise EngineError(
            f"one engine of tp_size {recipe.rollout.engine.tp_size} spans {nodes} nodes of "
            f"{recipe.cluster.gpus_per_node} GPUs: it is started on every node by the cluster's engine actors and "
            f"joined through rollout.engine.server_urls"
        )
    urls = []
    for index in range(recipe.num_engines):
        processes.append(start_node(recipe, model_dir, Place(engine=index), log_dir / f"sglang-{index}.log"))
        urls.append(f"http://{recipe.rollout.engine.host}:{server_port(recipe, index)}")
    return urls


async def _wait_for_answer(client: SglangClient, timeout_s: float) -> None:
    """A server that somebody else started may still be loading its weights."""
    deadline = time.monotonic() + timeout_s
    while (problem := await client.healthy()) is not None:
        if time.monotonic() > deadline:
            raise EngineError(
                f"rollout.engine.server_urls: no answer within {timeout_s:g} s (rollout.engine.startup_timeout_s): "
                f"{problem}"
            )
        await asyncio.sleep(min(2.0, max(0.05, deadline - time.monotonic())))


async def _compare(recipe: Recipe, clients: list[SglangClient], tree: Abilities | None) -> tuple[Abilities, str]:
    """All servers are of one version that can serve the recipe, with the recipe's settings and equal weights."""
    seen: dict[str, tuple[Abilities, str]] = {}
    for client in clients:
        info = await client.server_info()
        has = tree or abilities_of_server(str(info.get("version")))
        require_abilities(recipe, has)
        wrong = differences(recipe, info)
        if wrong:
            raise EngineError(f"{client.url} does not run with the recipe's settings: {'; '.join(wrong)}; restart it")
        seen[client.url] = (has, str((await client.model_info()).get("weight_version")))
    if len({(has.version, version) for has, version in seen.values()}) > 1:
        texts = [f"{url}: SGLang {has.version}, weights {version}" for url, (has, version) in seen.items()]
        raise EngineError(f"the servers differ, restart them together: {'; '.join(texts)}")
    return next(iter(seen.values()))


def _options(recipe: Recipe, text: dict[str, Any], has: Abilities) -> SglangOptions:
    dsa, (_, _, topk, layers) = text.get("dsa_config"), DSA_FIELDS
    try:
        shape = ModelShape(
            vocab_size=text["vocab_size"],
            num_layers=text["num_hidden_layers"],
            num_experts=text["num_experts"],
            experts_per_token=text["num_experts_per_token"],
            index_layers=len(dsa[layers]) if dsa else 0,
            index_topk=dsa[topk] if dsa else 0,
        )
        factors = expected_factors(text, recipe.train.lora)
    except KeyError as error:
        raise EngineError(f"config.json: text_config (or its dsa_config) has no field {error}") from error
    engine = recipe.rollout.engine
    return SglangOptions(
        shape=shape,
        factors=factors,
        lora=recipe.train.lora,
        max_total_tokens=engine.max_total_tokens,
        flat_candidates=has.has_flat_candidates,
        base_kept=engine.lora_base_cpu_backup,
        pinned_adapters=engine.attn_dp_size > 1,
    )
