"""Reports of all nodes against the recipe: a list of named problems, each with node and next step. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from k31core.cluster.node_report import NodeReport

CLUSTER = "cluster"
"""`node` of a problem that belongs to no single node."""
MAX_CLOCK_SKEW_S = 2.0
MAX_USED_GPU_MIB = 2048
"""More than this before we start: another process holds the card."""


class PreflightError(RuntimeError):
    """The cluster cannot run the recipe; lists every problem, not only the first."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    node: str
    what: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}. {self.next_step}"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks of the cluster (from the recipe and the plan)."""

    num_nodes: int
    gpus_per_node: int
    accelerator: str | None = None
    """Part of the card's name, e.g. `H200`."""
    save_free_bytes: int = 0
    """Free space on the shared directory for the saves that retention keeps."""
    host_memory_bytes: int = 0
    """Peak of host memory a node (offloaded optimizer and engine's base copy)."""
    gpu_memory_mib: int = 0
    cards_are_free: bool = True
    """False while workers of this run live: what lies on the cards is their own."""
    needs_checkpoint: bool = True
    token_text: str | None = None


def check_nodes(reports: Sequence[NodeReport], needs: Needs, driver_clock: tuple[float, float]) -> list[Problem]:
    """Every disagreement between the nodes and the recipe, and among the nodes.

    `driver_clock` is (when the driver asked, when the last answer was there), by the driver's own clock.
    """
    problems = []
    if len(reports) < needs.num_nodes:
        names = ", ".join(sorted(r.node for r in reports)) or "none"
        problems.append(
            Problem(
                CLUSTER,
                f"{len(reports)} of {needs.num_nodes} nodes answered ({names})",
                "start Ray on the missing nodes (`ray start --address HEAD:6379`), or lower cluster.num_nodes",
            )
        )
    for report in reports:
        problems.extend(_check_node(report, needs, driver_clock))
    for what, read, step in _MUST_AGREE:
        problems.extend(_check_agreement(reports, what, read, step))
    return problems


def require(problems: Iterable[Problem]) -> None:
    """Raise PreflightError when there is a problem."""
    lines = [f"  {problem}" for problem in problems]
    if lines:
        raise PreflightError(f"the cluster is not ready ({len(lines)} problems):\n" + "\n".join(lines))


def stale_placement_groups(existing: Mapping[str, str], run_id: str, prefix: str = "k31:") -> list[Problem]:
    """Placement groups of earlier runs that still hold resources: `existing` is name → state as Ray lists them."""
    return [
        Problem(
            CLUSTER,
            f"placement group {name!r} ({state}) of another run holds GPUs",
            f"resume or end that run ({name.removeprefix(prefix)}); `k31 down` removes what nobody works on",
        )
        for name, state in sorted(existing.items())
        if name.startswith(prefix) and name != f"{prefix}{run_id}" and state not in ("REMOVED",)
    ]


def _check_node(report: NodeReport, needs: Needs, driver_clock: tuple[float, float]) -> list[Problem]:
    found: list[tuple[str, str]] = []
    if len(report.gpus) < needs.gpus_per_node:
        detail = f" ({report.unread['gpus']})" if "gpus" in report.unread else ""
        found.append(
            (
                f"{len(report.gpus)} GPUs, the recipe needs {needs.gpus_per_node}{detail}",
                "look at `nvidia-smi` there: a card may have fallen off the bus",
            )
        )
    if needs.gpus_per_node:
        found.extend(_check_gpus(report, needs))
    found.extend(_check_storage(report, needs))
    asked, answered = driver_clock
    skew = max(asked - report.started_at, report.finished_at - answered, 0.0)
    if skew > MAX_CLOCK_SKEW_S:
        found.append((f"its clock is off by at least {skew:.1f} s", "start time synchronisation (chrony) there"))
    if report.memory_total_bytes < needs.host_memory_bytes:
        found.append(
            (
                f"{report.memory_total_bytes / 1e9:.0f} GB of host memory, the run peaks at "
                f"{needs.host_memory_bytes / 1e9:.0f} GB",
                "lower train.optimizer.cpu_offload_fraction or turn rollout.engine.lora_base_cpu_backup off",
            )
        )
    if needs.gpus_per_node and report.ports.ports and report.locked_memory_limit_bytes is not None:
        found.append(
            (
                f"locked memory is limited to {report.locked_memory_limit_bytes} bytes; InfiniBand needs it unlimited",
                "start the container with `--ulimit memlock=-1`",
            )
        )
    return [Problem(report.node, what, step) for what, step in found]


def _check_gpus(report: NodeReport, needs: Needs) -> list[tuple[str, str]]:
    found = []
    for gpu in report.gpus:
        # word by word: "B300" must not accept a GB300
        if needs.accelerator and needs.accelerator not in gpu.name.replace("-", " ").split():
            found.append(
                (
                    f"GPU {gpu.index} is {gpu.name!r}, the recipe is for {needs.accelerator}",
                    "take that node out, or set cluster.accelerator and use a recipe sized for the card",
                )
            )
        if needs.cards_are_free and gpu.memory_used_mib > MAX_USED_GPU_MIB:
            found.append(
                (
                    f"GPU {gpu.index} already holds {gpu.memory_used_mib} MiB of another process",
                    "end that process (`nvidia-smi` lists it) or wait for its teardown",
                )
            )
        if gpu.memory_total_mib < needs.gpu_memory_mib:
            found.append(
                (
                    f"GPU {gpu.index} has {gpu.memory_total_mib} MiB, the plan needs {needs.gpu_memory_mib}",
                    "see `k31 plan` for what to shrink",
                )
            )
    return found


def _check_storage(report: NodeReport, needs: Needs) -> list[tuple[str, str]]:
    found = []
    if needs.needs_checkpoint and report.checkpoint_digest is None:
        found.append(
            (
                f"no usable checkpoint ({report.unread.get('checkpoint', 'no directory given')})",
                "run `k31/prepare` on that node, or mount the shared model directory at the same path",
            )
        )
    if needs.token_text is not None and report.token_text != needs.token_text:
        why = report.unread.get("token", f"read {report.token_text!r} instead of {needs.token_text!r}")
        found.append((f"the save directory is not the shared one ({why})", "mount the same directory on every node"))
    if needs.save_free_bytes and (report.save_free_bytes or 0) < needs.save_free_bytes:
        found.append(
            (
                f"{(report.save_free_bytes or 0) / 1e9:.1f} GB free in the save directory, "
                f"the saves need {needs.save_free_bytes / 1e9:.1f} GB",
                "free space, or lower save.keep_last / turn save.optimizer off",
            )
        )
    return found


def _cards(report: NodeReport) -> str | None:
    return ", ".join(sorted({gpu.name for gpu in report.gpus})) or None


_MUST_AGREE: tuple[tuple[str, Callable[[NodeReport], str | None], str], ...] = (
    ("driver", lambda r: r.driver, "install the same driver on every node"),
    ("GPU model", _cards, "use nodes of one kind"),
    ("NCCL", lambda r: r.nccl, "use the same image on every node"),
    ("image version", lambda r: r.image, "pull the same image on every node"),
    ("architecture", lambda r: r.architecture, "use nodes of one kind"),
    ("Python", lambda r: r.python, "use the same image on every node"),
    (
        "checkpoint digest",
        lambda r: r.checkpoint_digest,
        "verify the checkpoint there (`k31 verify-model`) or copy it again",
    ),
)


def _check_agreement(
    reports: Sequence[NodeReport], what: str, read: Callable[[NodeReport], str | None], step: str
) -> list[Problem]:
    """Nodes that differ from the most common value (ties: the first node's)."""
    values = [read(report) for report in reports]
    if len(set(values)) <= 1:
        return []
    usual = Counter(values).most_common(1)[0][0]
    example = reports[values.index(usual)].node
    return [
        Problem(report.node, f"{what} is {value or 'unknown'}, on {example} it is {usual or 'unknown'}", step)
        for report, value in zip(reports, values, strict=True)
        if value != usual
    ]
