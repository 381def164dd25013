"""What a start remembers about ports for the next one: readings, NCCL's word, and what stays left out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k31core.cluster.infiniband import BadPort, HcaDecision
from k31core.cluster.nccl_log import LogFollower, NcclFault
from k31core.observe.jsonl import write_atomic

NCCL_LOG = "nccl.%h.%p.log"
"""As NCCL_DEBUG_FILE names it: host and process."""
_LOGS = ("nccl.*.log", "sglang-*.log")
_SCANNED = "scanned.json"
"""How far each log was read, beside the logs."""


Positions = dict[str, tuple[int, int]]
"""Log's name → (inode, bytes read)."""


def faults_in_logs(folder: Path) -> tuple[list[NcclFault], Positions]:
    """Faults in NCCL's own files and the servers' logs, which may still grow, since what `remember_read` was told.

    Remember the positions once the faults are in the ledger: a start that fails before must find them again.
    """
    scanned = folder / _SCANNED
    read: Positions = json.loads(scanned.read_bytes()) if scanned.is_file() else {}
    faults, positions = list[NcclFault](), Positions()
    for path in sorted(path for pattern in _LOGS for path in folder.glob(pattern)):
        follower = LogFollower(path, read.get(path.name))
        faults += follower.poll()
        if follower.position is not None:
            positions[path.name] = follower.position
    return faults, positions


def remember_read(folder: Path, positions: Positions) -> None:
    """The next call begins there."""
    write_atomic(folder / _SCANNED, json.dumps(positions).encode())


def left_out_before(decision: Mapping[str, Any] | None, *, readmit: bool, workers_alive: bool = False) -> list[BadPort]:
    """Ports of the last decision (as the ledger has it) that stay out although a look at them shows nothing.

    A port that was down is judged by its state again; one that flapped or lost a connection would be let in and fail
    again, so it stays out for the rest of the run unless `readmit` (`cluster.readmit_hcas`). While workers of the run
    live, all stay out: letting one in would mean to start them anew.
    """
    if decision is None or (readmit and not workers_alive):
        return []
    ports = [BadPort(**port) for port in decision["excluded"]]
    return ports if workers_alive else [port for port in ports if not port.why.startswith("state ")]


def nccl_variables(decision: HcaDecision, logs: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """For every worker: the ports, and NCCL's warnings in files that `faults_in_logs` finds; none without ports."""
    if not any(decision.used.values()) and decision.nccl_ib_hca is None:
        return {}
    variables = {"NCCL_DEBUG": inherited.get("NCCL_DEBUG", "WARN"), "NCCL_DEBUG_FILE": str(logs / NCCL_LOG)}
    if decision.nccl_ib_hca is not None:
        variables["NCCL_IB_HCA"] = decision.nccl_ib_hca
    return variables
