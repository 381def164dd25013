"""Every node of the attached Ray cluster looked at before a start and before every resume.

    token on the shared save directory ──► collect() on each node, all at once ──► problems, and the ports to leave out

Call it inside a Ray session (one machine without GPUs needs none). The result goes to the ledger and is shown;
`require` turns problems into an error.
"""

import json
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from k31core.cluster.infiniband import BadPort, HcaDecision, NodePorts, bad_ports, decide, error_warnings
from k31core.cluster.nccl_log import NcclFault
from k31core.cluster.node_report import (
    NodeQuery,
    NodeReport,
    collect,
    read_answers,
    remove_token,
    write_token,
)
from k31core.cluster.preflight import Needs, Problem, check_nodes
from k31core.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Survey:
    """What all nodes said, and what follows."""

    reports: tuple[NodeReport, ...]
    problems: tuple[Problem, ...]
    hcas: HcaDecision

    def to_json(self) -> dict[str, Any]:
        """A record for the ledger and an artifact."""
        return {
            "reports": [report.to_json() for report in self.reports],
            "problems": [asdict(problem) for problem in self.problems],
            "infiniband": self.hcas.to_json(),
        }


@dataclass(frozen=True, slots=True)
class ByteNeeds:
    """What the plan of a recipe asks of each node; 0 is not judged."""

    gpu_memory_bytes: int = 0
    """Peak of the fullest card."""
    host_memory_bytes: int = 0
    """Peak of the fullest host."""
    save_free_bytes: int = 0
    """What the run still writes into the save directory, less what retention will have deleted."""


def needs_of(recipe: Recipe, planned: ByteNeeds | None = None, *, workers_alive: bool = False) -> Needs:
    """What a recipe and its plan ask of the nodes. `workers_alive`: of this run, so their memory is in use."""
    cluster, planned = recipe.cluster, planned or ByteNeeds()
    return Needs(
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        accelerator=cluster.accelerator,
        save_free_bytes=planned.save_free_bytes,
        host_memory_bytes=planned.host_memory_bytes,
        gpu_memory_mib=-(-planned.gpu_memory_bytes // 2**20),
        cards_are_free=not workers_alive,
    )


def survey(
    recipe: Recipe,
    needs: Needs,
    query: NodeQuery,
    *,
    before: Sequence[NodePorts] = (),
    faults: Iterable[BadPort] = (),
    query_of: Callable[[NodeQuery], NodeQuery] = lambda query: query,
) -> Survey:
    """Ask every living node within `cluster.bringup_timeout_s`.

    query: directories to look at; node and token are filled in here. before: the ports at the last survey. faults:
    ports that NCCL reported since. query_of: changes one node's query (tests). Raises InfinibandError when too few
    ports are left.
    """
    save_dir = None if query.save_dir is None else Path(query.save_dir)
    token = f".k31-token-{uuid.uuid4().hex[:12]}"
    if save_dir is not None:
        query = replace(query, token=token)
        needs = replace(needs, token_text=token)
        write_token(save_dir, token, token)
    try:
        asked = time.time()
        if is_one_machine(recipe):
            reports, problems = [collect(query_of(replace(query, node=platform.node())))], list[Problem]()
        else:
            nodes = {_name(node): node["NodeID"] for node in ray.nodes() if node["Alive"]}
            reports, problems = _ask(nodes, query, query_of, recipe.cluster.bringup_timeout_s)
        problems += check_nodes(reports, needs, (asked, time.time()))
        if save_dir is not None:
            problems += _missing_answers(reports, set(read_answers(save_dir, token)))
    finally:
        if save_dir is not None:
            remove_token(save_dir, token)
    return Survey(tuple(reports), tuple(problems), _decide(recipe, reports, before, faults))


def is_one_machine(recipe: Recipe) -> bool:
    """One node without GPUs: looked at directly, without a task on a node."""
    return recipe.cluster.num_nodes == 1 and recipe.cluster.gpus_per_node == 0


def faulted_ports(faults: Iterable[NcclFault], node_of: Callable[[str], str] = lambda host: host) -> list[BadPort]:
    """Ports to leave out because NCCL lost their link; faults without a device (old NCCL) name none."""
    return [
        BadPort(node_of(fault.host or ""), fault.device, fault.port or 0, f"{fault.status} (peer {fault.peer})")
        for fault in faults
        if fault.link_lost and fault.device is not None
    ]


def write_ports(path: Path, reports: Sequence[NodeReport]) -> None:
    """Keep the readings for the next survey."""
    path.write_text(json.dumps([asdict(report.ports) for report in reports], indent=1), encoding="utf-8")


def read_ports_before(path: Path) -> tuple[NodePorts, ...]:
    """The readings of the last survey; none when there was none."""
    if not path.is_file():
        return ()
    return tuple(NodePorts.from_json(tree) for tree in json.loads(path.read_text(encoding="utf-8")))


def _name(node: dict[str, Any]) -> str:
    """Host and the start of Ray's id: unique, and a person finds the machine."""
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"


def _ask(
    nodes: dict[str, str], query: NodeQuery, query_of: Callable[[NodeQuery], NodeQuery], timeout_s: float
) -> tuple[list[NodeReport], list[Problem]]:
    ask = ray.remote(num_cpus=0, max_retries=0)(collect)
    calls = {}
    for name, node_id in sorted(nodes.items()):
        strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        calls[ask.options(scheduling_strategy=strategy).remote(query_of(replace(query, node=name)))] = name
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    reports, problems = [], []
    for call in done:
        try:
            reports.append(ray.get(call))
        except ray.exceptions.RayError as error:
            problems.append(
                Problem(
                    calls[call], f"its report failed: {str(error).strip().splitlines()[-1]}", "look at Ray's log there"
                )
            )
    for call in late:
        ray.cancel(call, force=True)
        problems.append(
            Problem(
                calls[call], f"no report within {timeout_s:g} s (cluster.bringup_timeout_s)", "is its disk hanging?"
            )
        )
    return sorted(reports, key=lambda report: report.node), problems


def _missing_answers(reports: Sequence[NodeReport], answered: set[str]) -> list[Problem]:
    return [
        Problem(
            report.node,
            "what it wrote into the save directory is not seen here",
            "mount the same directory, writable, on every node",
        )
        for report in reports
        if report.token_text is not None and report.node not in answered
    ]


def _decide(
    recipe: Recipe, reports: Sequence[NodeReport], before: Sequence[NodePorts], faults: Iterable[BadPort]
) -> HcaDecision:
    past = {ports.node: ports for ports in before}
    bad, warnings = list(faults), list[str]()
    for report in reports:
        old = past.get(report.node)
        bad += bad_ports(report.ports, old)
        warnings += [] if old is None else error_warnings(report.ports, old)
    return decide(
        [report.ports for report in reports],
        bad,
        user_value=recipe.env.variables.get("NCCL_IB_HCA"),
        min_per_node=recipe.cluster.min_hcas_per_node,
        warnings=warnings,
    )
