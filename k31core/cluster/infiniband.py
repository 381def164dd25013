"""InfiniBand ports: read them from sysfs, find the bad ones, and leave exactly those out of NCCL.

A port that goes down in a run kills it (`IBV_WC_RETRY_EXC_ERR`), so every node reads its ports before a start and
before every resume. One `NCCL_IB_HCA` holds for all processes of the run: a port left out because of one node is left
out on all, which keeps the rails of the nodes paired.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k31core.cluster.nccl_hca import ANY_PORT, MAX_ENTRIES, Selector, parse_selector, render_selector

SYSFS_ROOT = Path("/sys/class/infiniband")
FLAP_COUNTERS = ("link_downed", "link_error_recovery")
"""A rise of one of these between two readings means that the link was lost in between."""
ERROR_COUNTERS = (
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Reported when they rise, never a reason to leave a port out: a few are normal at full rate."""


class InfinibandError(RuntimeError):
    """Ports that cannot carry the run: names node, devices and what to do."""


@dataclass(frozen=True, slots=True)
class Port:
    """One port at one moment."""

    device: str
    port: int
    state: str
    """Logical state, e.g. `ACTIVE`, `DOWN`, `INIT`, `ARMED`."""
    phys_state: str
    """Physical state, e.g. `LinkUp`, `Disabled`, `Polling`."""
    link_layer: str
    """`InfiniBand` or `Ethernet` (RoCE)."""
    rate: str
    counters: Mapping[str, int]
    """Counters that this port has; a virtual function has none."""

    @property
    def name(self) -> str:
        """`device:port`, as NCCL writes it."""
        return f"{self.device}:{self.port}"

    @property
    def up(self) -> bool:
        """Whether traffic can pass."""
        return self.state == "ACTIVE" and self.phys_state == "LinkUp"


@dataclass(frozen=True, slots=True)
class NodePorts:
    """All ports of one node at one moment."""

    node: str
    taken_at: float
    """Unix seconds."""
    ports: tuple[Port, ...]

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "NodePorts":
        """Undo `dataclasses.asdict`."""
        return cls(tree["node"], tree["taken_at"], tuple(Port(**port) for port in tree["ports"]))


@dataclass(frozen=True, slots=True)
class BadPort:
    """A port to leave out, and why."""

    node: str
    device: str
    port: int
    """0 when only the device is known (from NCCL's log): all its ports."""
    why: str


@dataclass(frozen=True, slots=True)
class HcaDecision:
    """What was decided before a start or a resume; a line of the ledger."""

    nccl_ib_hca: str | None
    """Value for every process of the run; None leaves the variable unset."""
    user_value: str | None
    excluded: tuple[BadPort, ...]
    used: Mapping[str, tuple[str, ...]]
    """Ports each node will use."""
    warnings: tuple[str, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """The record for the ledger."""
        return {"decision": "infiniband", **asdict(self)}


def read_ports(node: str, root: Path = SYSFS_ROOT) -> NodePorts:
    """Read every port below `root`; a machine without InfiniBand has none."""
    ports = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        numbered = [p for p in (device / "ports").glob("*") if p.name.isdigit()]
        for folder in sorted(numbered, key=lambda p: int(p.name)):
            ports.append(_read_port(device.name, folder))
    return NodePorts(node, time.time(), tuple(ports))


def _read_port(device: str, folder: Path) -> Port:
    return Port(
        device=device,
        port=int(folder.name),
        state=_after_colon(_text(folder / "state")),
        phys_state=_after_colon(_text(folder / "phys_state")),
        link_layer=_text(folder / "link_layer"),
        rate=_text(folder / "rate"),
        counters=_counters(folder / "counters"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # a port whose device is being reset answers EINVAL or vanishes: that port is not usable
        return "unreadable"


def _after_colon(text: str) -> str:
    return text.partition(":")[2].strip() or text


def _counters(folder: Path) -> dict[str, int]:
    values = {}
    for name in (*FLAP_COUNTERS, *ERROR_COUNTERS):
        text = _text(folder / name)
        if text.isdigit():
            values[name] = int(text)
    return values


def bad_ports(now: NodePorts, before: NodePorts | None = None) -> tuple[BadPort, ...]:
    """Ports of a node that are down, and those that lost their link since the reading `before`."""
    past = {} if before is None else {port.name: port for port in before.ports}
    found = []
    for port in now.ports:
        if not port.up:
            why = f"state {port.state}, physical state {port.phys_state}"
            found.append(BadPort(now.node, port.device, port.port, why))
            continue
        old = past.get(port.name)
        rises = [] if old is None else _rises(old, port, FLAP_COUNTERS)
        if rises:
            found.append(BadPort(now.node, port.device, port.port, f"flapping: {', '.join(rises)}"))
    present = {port.name for port in now.ports}
    for old in past.values():
        if old.name not in present:
            found.append(BadPort(now.node, old.device, old.port, "vanished since the last reading"))
    return tuple(found)


def error_warnings(now: NodePorts, before: NodePorts) -> tuple[str, ...]:
    """Error counters that rose between two readings, one sentence a port."""
    past = {port.name: port for port in before.ports}
    lines = []
    for port in now.ports:
        old = past.get(port.name)
        rises = [] if old is None else _rises(old, port, ERROR_COUNTERS)
        if rises:
            lines.append(f"{now.node} {port.name}: {', '.join(rises)} in {now.taken_at - before.taken_at:.0f} s")
    return tuple(lines)


def _rises(old: Port, new: Port, names: Sequence[str]) -> list[str]:
    """`name old->new` of counters that grew. A smaller value is a reset counter: the new baseline, not a fault."""
    both = [name for name in names if name in old.counters and name in new.counters]
    pairs = [(name, old.counters[name], new.counters[name]) for name in both]
    return [f"{name} {a}->{b}" for name, a, b in pairs if b > a]


def decide(
    nodes: Sequence[NodePorts],
    bad: Iterable[BadPort],
    *,
    user_value: str | None = None,
    min_per_node: int = 0,
    warnings: Sequence[str] = (),
) -> HcaDecision:
    """The one `NCCL_IB_HCA` for the run: the user's choice less the bad ports.

    Raises InfinibandError when a node keeps fewer than `min_per_node` ports, or when the list is too long for NCCL.
    """
    chosen = parse_selector(user_value) if user_value is not None else None
    bad = tuple(sorted(set(bad), key=lambda b: (b.node, b.device, b.port)))
    seen = sorted({(port.device, port.port) for node in nodes for port in node.ports})
    if chosen is not None:
        bad = tuple(b for b in bad if any(chosen.selects(b.device, p) for p in ([b.port] if b.port else (1, 2))))
    dropped = {(b.device, p) for b in bad for p in _ports_of(b, seen)}
    value = user_value if not dropped else _value(chosen, seen, dropped, nodes)
    final = parse_selector(value) if value is not None else None
    used = {
        node.node: tuple(p.name for p in node.ports if p.up and (final is None or final.selects(p.device, p.port)))
        for node in nodes
    }
    _check_enough(nodes, used, bad, min_per_node)
    return HcaDecision(value, user_value, bad, used, tuple(warnings))


def _ports_of(bad: BadPort, seen: Sequence[tuple[str, int]]) -> list[int]:
    """The port numbers a bad port stands for; a device that is gone keeps the entry for the whole device."""
    return [bad.port] if bad.port else [p for d, p in seen if d == bad.device] or [ANY_PORT]


def _value(
    chosen: Selector | None,
    seen: Sequence[tuple[str, int]],
    dropped: set[tuple[str, int]],
    nodes: Sequence[NodePorts],
) -> str:
    if chosen is None or chosen.exclude:
        users = set() if chosen is None else {port for port in seen if not chosen.selects(*port)}
        unseen = set() if chosen is None or not chosen.exact else {e for e in chosen.entries if e[0] not in dict(seen)}
        selector = Selector(exclude=True, exact=True, entries=tuple(sorted(dropped | users)) + tuple(sorted(unseen)))
    else:
        kept = tuple(port for port in seen if chosen.selects(*port) and port not in dropped)
        if not kept:
            raise InfinibandError(
                f"NCCL_IB_HCA selects only ports that are bad: {_names(dropped)} on "
                f"{', '.join(node.node for node in nodes)}; repair them or select others"
            )
        selector = Selector(exclude=False, exact=True, entries=kept)
    if len(selector.entries) > MAX_ENTRIES:
        raise InfinibandError(
            f"NCCL_IB_HCA would need {len(selector.entries)} entries and NCCL reads the first {MAX_ENTRIES} only: "
            f"repair some of {_names(dropped)}, or set env.variables.NCCL_IB_HCA to the ports to use"
        )
    return render_selector(selector)


def _check_enough(
    nodes: Sequence[NodePorts], used: Mapping[str, tuple[str, ...]], bad: Sequence[BadPort], minimum: int
) -> None:
    short = [node for node in nodes if len(used[node.node]) < minimum]
    if not short:
        return
    lines = []
    for node in short:
        own = [f"{b.device}:{b.port or '*'} ({b.why})" for b in bad if _is_on(b, node)]
        others = [f"{b.device}:{b.port or '*'} (bad on {b.node})" for b in bad if not _is_on(b, node)]
        lines.append(
            f"node {node.node}: {len(used[node.node])} usable of {len(node.ports)} ports, {minimum} needed "
            f"(cluster.min_hcas_per_node); left out: {', '.join(own + others) or 'none'}"
        )
    raise InfinibandError("too few InfiniBand ports\n" + "\n".join(lines) + "\nrepair the ports or replace the node")


def _is_on(bad: BadPort, node: NodePorts) -> bool:
    """NCCL's log knows the host, the survey calls the node `host-id`."""
    return bad.node == node.node or node.node.startswith(f"{bad.node}-")


def _names(ports: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{device}:{port}" for device, port in sorted(ports))
