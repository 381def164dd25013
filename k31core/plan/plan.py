"""The plan of a recipe: every rank and host, the peak of each phase, what does not fit, and the sums users know."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from k31core.model.config import ModelConfig
from k31core.model.layout import check_layout
from k31core.model.sizes import PUBLISHED
from k31core.plan.cards import CARD_MEMORY, GIB
from k31core.plan.memory import Items, engine_share, sync_items, trainer_host_items, trainer_items
from k31core.plan.ranks import RankWeights, build_rank
from k31core.recipe.load import START_LINES, resolve
from k31core.recipe.recipe import Recipe

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One trainer rank, bytes by item, and the peak of its card in each phase."""

    weights: RankWeights
    items: Items
    host_items: Items
    sync: Items
    """Beside weights and adapter, while an adapter is sent."""
    phases: Items
    """`train`, `rollout`, `sync`: what lies on the card at once."""

    @property
    def peak(self) -> int:
        """Largest phase."""
        return max(self.phases.values())


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host: the sum over its ranks, bytes by item."""

    host: int
    ranks: tuple[int, int]
    parameters: int
    """Of trainer base and adapter on its cards, replicated ones counted on each."""
    cards: Items
    """What its cards hold of each item, whatever the phase; the engine's share as `engine_...`."""
    items: Items
    """What the host's own memory holds."""

    @property
    def total(self) -> int:
        """All items of the host's memory."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `k31 plan` prints."""

    recipe: str
    checks: dict[str, Any]
    totals: dict[str, float]
    ranks: list[RankPlan]
    engine: Items
    hosts: list[HostPlan]
    card_memory: int | None
    published: dict[str, float]
    unaccounted: dict[str, float]
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values with `schema_version`; bytes unless a name says otherwise."""
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self),
            "ranks": [{**asdict(rank), "peak": rank.peak} for rank in self.ranks],
            "hosts": [{**asdict(host), "total": host.total} for host in self.hosts],
            "fits": not self.problems,
        }


class PlanError(ValueError):
    """A recipe whose sizes are not known."""


def sizes_of(recipe: Recipe) -> ModelConfig:
    """The published sizes of a recipe's model. Raises PlanError for one that was never published."""
    published = PUBLISHED[recipe.model.family]
    if recipe.model.variant == "4layer":
        return replace(published, num_hidden_layers=4, mla_layers=(3,))
    if recipe.model.variant != "full":
        raise PlanError(
            f"recipe {recipe.name!r} has no published sizes (model.variant {recipe.model.variant!r}): "
            "give --model-dir with its checkpoint"
        )
    return published


def make_plan(recipe: Recipe, config: ModelConfig | None = None) -> Plan:
    """Plan `recipe` for the published sizes of its model (or `config`). Raises LayoutError or PlanError."""
    config = config or sizes_of(recipe)
    parallel = recipe.train.parallel
    check_layout(config, parallel)
    engine = engine_share(config, recipe).items
    ranks = [_rank_plan(config, recipe, rank, engine) for rank in range(parallel.world_size)]
    per_host = recipe.cluster.gpus_per_node or parallel.world_size
    hosts = [
        _host_plan(recipe, first // per_host, ranks[first : first + per_host], engine)
        for first in range(0, len(ranks), per_host)
    ]
    resolved = resolve(recipe).model_dump()
    card = CARD_MEMORY.get(recipe.cluster.accelerator or "")
    published, unaccounted = _published(recipe, ranks, hosts)
    return Plan(
        recipe=recipe.name,
        checks={name: resolved[name] for name in START_LINES},
        totals=_totals(recipe, ranks),
        ranks=ranks,
        engine=engine,
        hosts=hosts,
        card_memory=card,
        published=published,
        unaccounted=unaccounted,
        problems=_problems(recipe, ranks, hosts, card),
    )


def _rank_plan(config: ModelConfig, recipe: Recipe, rank: int, engine: Items) -> RankPlan:
    weights = build_rank(config, recipe, rank)
    items = trainer_items(config, recipe, weights)
    train = sum(items.values())
    rollout = sum(engine.values())
    buckets = sync_items(recipe)
    phases = {
        "train": train,
        "rollout": rollout,
        # The trainer brings back its adapter only; the engine holds its weights and adapter buffers, no cache yet.
        "sync": items["adapter"] + engine["experts"] + engine["base"] + engine["lora_buffers"] + sum(buckets.values()),
    }
    if not recipe.cluster.colocate:
        phases = {"train": train}
    return RankPlan(weights, items, trainer_host_items(recipe, weights), buckets, phases)


def _host_plan(recipe: Recipe, host: int, ranks: list[RankPlan], engine: Items) -> HostPlan:
    items: Items = {}
    cards: Items = {}
    for rank in ranks:
        _add(items, rank.host_items)
        _add(cards, rank.items | rank.sync | {f"engine_{name}": value for name, value in engine.items()})
    parameters = sum(rank.weights.base_parameters + rank.weights.adapter_parameters for rank in ranks)
    if recipe.rollout.engine.lora_base_cpu_backup and recipe.cluster.colocate:
        items["engine_base_copy"] = len(ranks) * (engine["experts"] + engine["base"])
    return HostPlan(host, (ranks[0].weights.rank, ranks[-1].weights.rank), parameters, cards, items)


def _add(total: Items, part: Items) -> None:
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


def _totals(recipe: Recipe, ranks: list[RankPlan]) -> dict[str, float]:
    owned = sum(rank.weights.adapter_owned for rank in ranks)
    by_stage: dict[int, RankWeights] = {}
    for rank in ranks:
        by_stage.setdefault(rank.weights.stage, rank.weights)
    stages = [by_stage[stage] for stage in sorted(by_stage)]
    totals: dict[str, float] = {
        "world_size": len(ranks),
        "adapter_parameters": owned,
        "adapter_bytes": owned * 2,
        "adam_state_bytes": owned * 12,
        "expert_bytes_first_stage": stages[0].expert_bytes,
        "expert_bytes_last_stage": stages[-1].expert_bytes,
        "base_bytes_largest": max(stage.base_bytes for stage in stages),
        "card_peak": max(rank.peak for rank in ranks),
    }
    if len(stages) > 2:
        totals["expert_bytes_middle_stage"] = stages[1].expert_bytes
    return totals


def _published(
    recipe: Recipe, ranks: list[RankPlan], hosts: list[HostPlan]
) -> tuple[dict[str, float], dict[str, float]]:
    """Published peaks in bytes, and what of them the items do not explain (negative: the items are larger)."""
    itemised = {
        "perf/gpu_peak_gib": (GIB, max(rank.peak for rank in ranks)),
        "perf/host_peak_gb": (10**9, max(host.total for host in hosts)),
        "perf/allocated_after_sync_gb": (10**9, max(_weights_only(rank) for rank in ranks)),
    }
    published, unaccounted = {}, {}
    for source in (recipe.health.peaks, recipe.health.typical):
        for name, (unit, value) in itemised.items():
            if name in source:
                published[name] = source[name] * unit
                unaccounted[name] = source[name] * unit - value
    return published, unaccounted


def _weights_only(rank: RankPlan) -> int:
    """What a trainer keeps allocated between phases: frozen weights, adapter, gradients, optimizer on the card."""
    return sum(rank.items[name] for name in ("experts", "base", "adapter", "gradients", "optimizer_gpu"))


def _problems(recipe: Recipe, ranks: list[RankPlan], hosts: list[HostPlan], card: int | None) -> list[str]:
    problems = []
    worst = max(ranks, key=lambda rank: rank.peak)
    if card is not None and worst.peak > card:
        phase = max(worst.phases, key=lambda name: worst.phases[name])
        advice = {
            "train": "raise train.parallel.pp or ep, lower train.max_tokens_per_gpu, or raise cpu_offload_fraction",
            "rollout": "lower rollout.engine.max_total_tokens or max_concurrent_requests, or raise tp_size",
            "sync": "lower sync.bucket_bytes",
        }[phase]
        problems.append(
            f"rank {worst.weights.rank}: the {phase} phase needs {worst.peak / GIB:.1f} GiB, the card has "
            f"{card / GIB:.1f} GiB: {advice}"
        )
    memory = recipe.cluster.host_memory_gb
    for host in hosts:
        if memory is not None and host.total > memory * 10**9:
            problems.append(
                f"host {host.host}: {host.total / 1e9:.0f} GB are needed, cluster.host_memory_gb is {memory:g}: turn "
                "rollout.engine.lora_base_cpu_backup off (with sync.resend_base on), or lower cpu_offload_fraction"
            )
    return problems
