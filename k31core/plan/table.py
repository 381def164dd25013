"""The plan as a person reads it in a terminal."""

from typing import Any

from k31core.plan.cards import GIB
from k31core.plan.plan import HostPlan, Plan, RankPlan

_GB = 1e9


def print_plan(plan: Plan, console: Any) -> None:
    """Print the four start-up lines, one column a pipeline stage, the engine, the hosts, and what does not fit."""
    for name, value in plan.checks.items():
        console.print(f"{name} {value}", highlight=False)
    totals = plan.totals
    console.print(
        f"\nadapter {totals['adapter_parameters'] / _GB:.3f} B parameters, {totals['adapter_bytes'] / _GB:.1f} GB in "
        f"BF16; Adam state {totals['adam_state_bytes'] / _GB:.0f} GB; {totals['world_size']:.0f} trainer ranks",
        highlight=False,
    )
    first_of_stage: dict[int, RankPlan] = {}
    for rank in plan.ranks:
        first_of_stage.setdefault(rank.weights.stage, rank)
    stages = [first_of_stage[stage] for stage in sorted(first_of_stage)]
    experts = " / ".join(f"{stage.weights.expert_bytes / _GB:.1f}" for stage in stages)
    console.print(f"routed experts a rank, by stage: {experts} GB", highlight=False)
    console.print(_stage_table(stages, plan))
    console.print(_engine_table(plan))
    console.print(_cards_table(plan.hosts))
    console.print(_host_table(plan.hosts))
    for name, value in plan.published.items():
        unit, label = (GIB, "GiB") if "gib" in name else (_GB, "GB")
        console.print(
            f"published {name}: {value / unit:.0f} {label}; items {(value - plan.unaccounted[name]) / unit:.0f}; "
            f"unaccounted {plan.unaccounted[name] / unit:+.0f} {label}",
            highlight=False,
        )
    for problem in plan.problems:
        console.print(f"does not fit: {problem}", style="bold red", highlight=False)
    if not plan.problems:
        known = "fits the card" if plan.card_memory else "card memory unknown, not judged"
        console.print(f"{known}; peak {totals['card_peak'] / GIB:.1f} GiB", style="green", highlight=False)


def _stage_table(stages: list[RankPlan], plan: Plan) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="trainer rank by pipeline stage (GiB)", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage\nlayers")
    for stage in stages:
        first, last = stage.weights.layers
        table.add_column(f"{stage.weights.stage}\n{first}-{last}", justify="right")
    counts = (stage.weights.base_parameters + stage.weights.adapter_parameters for stage in stages)
    table.add_row("parameters (billion)", *(f"{count / 1e9:.2f}" for count in counts))
    table.add_section()
    items = [stage.items | stage.sync for stage in stages]
    for name in dict.fromkeys(name for each in items for name in each):
        table.add_row(name.replace("_", " "), *(f"{each.get(name, 0) / GIB:.2f}" for each in items))
    table.add_section()
    for name in stages[0].host_items:
        table.add_row(f"host: {name.replace('_', ' ')}", *(f"{s.host_items[name] / GIB:.2f}" for s in stages))
    table.add_section()
    for phase in stages[0].phases:
        table.add_row(f"card, {phase} phase", *(f"{stage.phases[phase] / GIB:.1f}" for stage in stages))
    if plan.card_memory:
        table.add_row("card memory", *(f"{plan.card_memory / GIB:.1f}" for _ in stages))
    return table


def _engine_table(plan: Plan) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", "GiB", title="every engine rank", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    for name, value in plan.engine.items():
        table.add_row(name.replace("_", " "), f"{value / GIB:.2f}")
    table.add_section()
    table.add_row("sum", f"{sum(plan.engine.values()) / GIB:.1f}")
    return table


def _cards_table(hosts: list[HostPlan]) -> Any:
    """One column for neighbouring hosts that hold the same."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    groups: list[list[HostPlan]] = []
    for host in hosts:
        if groups and (groups[-1][0].cards, groups[-1][0].parameters) == (host.cards, host.parameters):
            groups[-1].append(host)
        else:
            groups.append([host])
    table = Table(title="all cards of a host (GB)", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("host")
    for group in groups:
        first, last = group[0].host, group[-1].host
        table.add_column(str(first) if first == last else f"{first}-{last}", justify="right")
    table.add_row("parameters (billion)", *(f"{group[0].parameters / 1e9:.1f}" for group in groups))
    table.add_section()
    for name in dict.fromkeys(name for host in hosts for name in host.cards):
        table.add_row(name.replace("_", " "), *(f"{group[0].cards.get(name, 0) / _GB:.1f}" for group in groups))
    return table


def _host_table(hosts: list[HostPlan]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = list(dict.fromkeys(name for host in hosts for name in host.items))
    headings = (name.replace("_", " ") for name in names)  # words wrap in a narrow terminal, names are cut
    table = Table(
        "host",
        "ranks",
        *headings,
        "sum",
        title="memory of the hosts (GB)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for host in hosts:
        values = (f"{host.items.get(name, 0) / _GB:.1f}" for name in names)
        table.add_row(str(host.host), f"{host.ranks[0]}-{host.ranks[1]}", *values, f"{host.total / _GB:.1f}")
    return table
