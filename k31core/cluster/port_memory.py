"""What a start remembers about ports for the next one: readings, NCCL's word, and what stays left out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k31core.cluster.infiniband import BadPort, HcaDecision
from k31core.cluster.nccl_log import LogFollower, NcclFault

NCCL_LOG = "nccl.%h.%p.log"
"""As NCCL_DEBUG_FILE names it: host and process."""
_LOGS = ("nccl.*.log", "sglang-*.log")


def faults_in_logs(folder: Path) -> list[NcclFault]:
    """Faults in NCCL's own files and the servers' logs since the last call; a file that was read is renamed `.seen`.

    Call it while no worker of the run lives: the files must not grow any more.
    """
    faults = []
    for path in sorted(path for pattern in _LOGS for path in folder.glob(pattern)):
        faults += LogFollower(path).poll()
        path.rename(path.with_name(f"{path.name}.seen"))
    return faults


def left_out_before(decision: Mapping[str, Any] | None, *, readmit: bool) -> list[BadPort]:
    """Ports of the last decision (as the ledger has it) that stay out although a look at them shows nothing.

    A port that was down is judged by its state again; one that flapped or lost a connection would be let in and fail
    again, so it stays out for the rest of the run unless `readmit` (`cluster.readmit_hcas`).
    """
    if decision is None or readmit:
        return []
    ports = [BadPort(**port) for port in decision["excluded"]]
    return [port for port in ports if not port.why.startswith("state ")]


def nccl_variables(decision: HcaDecision, logs: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """For every worker: the ports, and NCCL's warnings in files that `faults_in_logs` finds; none without ports."""
    if not any(decision.used.values()) and decision.nccl_ib_hca is None:
        return {}
    variables = {"NCCL_DEBUG": inherited.get("NCCL_DEBUG", "WARN"), "NCCL_DEBUG_FILE": str(logs / NCCL_LOG)}
    if decision.nccl_ib_hca is not None:
        variables["NCCL_IB_HCA"] = decision.nccl_ib_hca
    return variables
