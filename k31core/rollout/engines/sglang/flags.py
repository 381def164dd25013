"""The table from recipe fields to SGLang's command line and environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from k31core.recipe.errors import RecipeError
from k31core.recipe.recipe import Recipe
from k31core.rollout.engines.sglang.versions import Abilities

PORT_STEP = 100
"""Distance between the ports of two engines: SGLang takes some beside its HTTP port."""
DIST_PORT_OFFSET = 50
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOPPER = ("H100", "H200", "H800", "H20", "GH200")


@dataclass(frozen=True, slots=True)
class Flag:
    """A recipe field and the option that carries it."""

    field: str
    """Dotted path in the recipe."""
    option: str
    kind: Literal["value", "switch"]
    """A switch is given when the field is true; a value is given unless the field is None."""

    @property
    def attribute(self) -> str:
        """SGLang's name of the setting (`ServerArgs`, `/server_info`)."""
        return self.option.removeprefix("--").replace("-", "_")


FLAGS = (
    Flag("rollout.engine.tp_size", "--tp-size", "value"),
    Flag("rollout.engine.ep_size", "--ep-size", "value"),
    Flag("rollout.engine.moe_runner_backend", "--moe-runner-backend", "value"),
    Flag("rollout.engine.lora_backend", "--lora-backend", "value"),
    Flag("rollout.engine.kv_cache_dtype", "--kv-cache-dtype", "value"),
    Flag("rollout.engine.max_total_tokens", "--max-total-tokens", "value"),
    Flag("rollout.engine.load_balance_method", "--load-balance-method", "value"),
    Flag("rollout.engine.mem_fraction_static", "--mem-fraction-static", "value"),
    Flag("rollout.engine.lora_base_cpu_backup", "--enable-weights-cpu-backup", "switch"),
    Flag("rollout.routing_replay", "--enable-return-routed-experts", "switch"),
    Flag("rollout.indexer_replay", "--enable-return-indexer-topk", "switch"),
    Flag("train.lora.rank", "--max-lora-rank", "value"),
    Flag("train.lora.experts_shared_outer", "--experts-shared-outer-loras", "switch"),
    Flag("cluster.colocate", "--enable-memory-saver", "switch"),
    Flag("model.dtype", "--dtype", "value"),
    Flag("model.trust_remote_code", "--trust-remote-code", "switch"),
    Flag("seed", "--random-seed", "value"),
)
CONSTANT = (
    "--enable-lora",
    "--skip-tokenizer-init",  # token ids in, token ids out
    "--max-loras-per-batch",
    "2",
    "--max-loaded-loras",
    "2",
)
_COMPUTED = {
    "--model-path": "model.name and the model directory",
    "--host": "rollout.engine.host",
    "--port": "rollout.engine.port",
    "--base-gpu-id": "rollout.engine.tp_size and cluster.gpus_per_node",
    "--attn-dp-size": "rollout.engine.attn_dp_size",
    "--dp-size": "rollout.engine.attn_dp_size",
    "--enable-dp-attention": "rollout.engine.attn_dp_size",
    "--lora-target-modules": "train.lora.target_modules",
    "--nnodes": "cluster.num_nodes",
    "--node-rank": "cluster.num_nodes",
    "--dist-init-addr": "rollout.engine.port",
}
_SHORT = {"--tp": "--tp-size", "--ep": "--ep-size", "--dp": "--dp-size", "--model": "--model-path"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process of an engine runs."""

    engine: int = 0
    """Index of the engine."""
    node_rank: int = 0
    """Index of the node within its engine."""
    head_address: str = "127.0.0.1"
    """Address of the engine's first node."""


def server_port(recipe: Recipe, engine: int) -> int:
    """HTTP port of an engine."""
    return recipe.rollout.engine.port + PORT_STEP * engine


def server_host(recipe: Recipe, place: Place) -> str:
    """Address the server listens on: the rollout worker may be on another node than an engine that spans nodes."""
    host = recipe.rollout.engine.host
    return place.head_address if recipe.nodes_per_engine > 1 and host in LOOPBACK else host


def server_args(recipe: Recipe, model_dir: str, has: Abilities, place: Place) -> list[str]:
    """The arguments of `python -m sglang.launch_server` for one node of one engine.

    Raises RecipeError for an extra argument that contradicts a recipe field.
    """
    args = ["--model-path", model_dir]
    for flag in FLAGS:
        value = field_value(recipe, flag.field)
        if flag.kind == "switch":
            args += [flag.option] if value else []
        elif value is not None:
            args += [flag.option, str(value)]
    args += ["--host", server_host(recipe, place), "--port", str(server_port(recipe, place.engine)), *CONSTANT]
    args += ["--lora-target-modules", *lora_target_modules(recipe)]
    groups = recipe.rollout.engine.attn_dp_size
    if groups > 1:
        args += ["--attn-dp-size", str(groups)] if has.has_attn_dp_size else []
        args += [] if has.has_attn_dp_size else ["--dp-size", str(groups), "--enable-dp-attention"]
    per_node, cards = recipe.cluster.gpus_per_node, recipe.rollout.engine.tp_size
    if per_node > cards:  # several engines share a node
        args += ["--base-gpu-id", str(place.engine * cards % per_node)]
    nodes = recipe.nodes_per_engine
    if nodes > 1:
        address = f"{place.head_address}:{server_port(recipe, place.engine) + DIST_PORT_OFFSET}"
        args += ["--nnodes", str(nodes), "--node-rank", str(place.node_rank), "--dist-init-addr", address]
    return args + _extra_args(recipe)


def lora_target_modules(recipe: Recipe) -> list[str]:
    """SGLang's names of the recipe's targets; it does not tell dense, shared and routed feed-forwards apart."""
    targets = recipe.train.lora.target_modules
    chosen = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj", "mlp"} if targets == "all-linear" else set(targets)
    names = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if name in chosen]
    return names + (["gate_proj", "up_proj", "down_proj"] if chosen & {"mlp", "shared_experts", "experts"} else [])


def server_environment(recipe: Recipe, inherited: Mapping[str, str], card: str | None = None) -> dict[str, str]:
    """The environment of the server: what is inherited, what the recipes need, then the recipe's own variables.

    `card` is the name of the GPU on the node; None takes `cluster.accelerator`.
    """
    added = {
        # with NCCL 2.30.7 the RAS thread crashed on every node right after the engine first released its memory
        "NCCL_RAS_ENABLE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    engine = recipe.rollout.engine
    if recipe.model.family == "kimi_k31" and engine.attn_dp_size > 1:
        added["SGLANG_DSA_TOPK_BROADCAST"] = "1"  # else the ranks of a group can pick different keys
    words = (card or recipe.cluster.accelerator or "").replace("-", " ").split()
    if recipe.model.family == "kimi_k3" and set(words) & set(HOPPER):
        added["SGLANG_K3_ATTN_RES_MODE"] = "jit"
    if engine.sglang_path is not None:
        added["PYTHONPATH"] = os.pathsep.join(filter(None, (engine.sglang_path, inherited.get("PYTHONPATH"))))
    return {**inherited, **added, **recipe.env.variables}


def differences(recipe: Recipe, info: Mapping[str, Any]) -> list[str]:
    """Settings that a running server reports otherwise than the recipe wants: `option: server, recipe (field)`."""
    found = []
    for flag in FLAGS:
        if flag.attribute not in info or flag.option == "--random-seed":
            continue
        wanted, seen = field_value(recipe, flag.field), info[flag.attribute]
        if wanted is None or (flag.kind == "switch" and not wanted):
            continue
        if seen != wanted:
            found.append(f"{flag.option}: the server has {seen!r}, {flag.field} is {wanted!r}")
    return found


def field_value(recipe: Recipe, field: str) -> Any:
    """The value at a dotted path."""
    value: Any = recipe
    for name in field.split("."):
        value = getattr(value, name)
    return value


def _extra_args(recipe: Recipe) -> list[str]:
    known = {flag.option: flag.field for flag in FLAGS} | _COMPUTED
    for argument in recipe.rollout.engine.extra_args:
        option = argument.split("=", 1)[0]
        option = _SHORT.get(option, option)
        if option in known:
            raise RecipeError(
                f"rollout.engine.extra_args has {argument!r}, which {known[option]} already decides: set that instead"
            )
    return list(recipe.rollout.engine.extra_args)
