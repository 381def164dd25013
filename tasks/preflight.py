"""Stage cluster: every node is looked at before a start and before every resume, and the ranks' network once they run.

nodes, ports, logs ──► problems? stop ──► NCCL's variables ──► (workers start) ──► all-reduce over all ranks
"""

import os
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.cluster import actors
from k31core.cluster.node_report import NodeQuery
from k31core.cluster.port_memory import faults_in_logs, left_out_before, nccl_variables, remember_read
from k31core.cluster.preflight import require
from k31core.cluster.survey import faulted_ports, needs_of, read_ports_before, survey, write_ports
from k31core.observe.ledger import Phase
from tasks.cluster_artifact import publish_cluster
from tasks.planned_bytes import planned_bytes
from tasks.run_directory import Run

PORTS_FILE = "infiniband.json"
LOGS = "logs"
"""NCCL's warnings and the servers' logs, inside the run directory."""


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE, persist_result=False)
def check_cluster(run: Run) -> dict[str, str]:
    """Survey the cluster; returns NCCL's variables for every worker process.

    Ports that an earlier start of the run left out stay out, unless `cluster.readmit_hcas`. Raises PreflightError
    listing every problem, InfinibandError when too few ports are left.
    """
    assert run.prepared is not None
    cluster, log = run.recipe.cluster, get_run_logger()
    ports, logs = run.store.root / PORTS_FILE, run.store.root / LOGS
    logs.mkdir(exist_ok=True)
    alive = bool(actors.names(f"{run.store.root}:"))
    last = run.store.ledger.last(Phase.CLUSTER)
    seen, positions = faults_in_logs(logs)
    faults = faulted_ports(seen)
    decided = last["outputs"]["infiniband"] if last else None
    faults += left_out_before(decided, readmit=cluster.readmit_hcas, workers_alive=alive)
    planned = planned_bytes(run.recipe, run.prepared.model_dir, run.store)
    query = NodeQuery(
        node="",
        model_dir=str(run.prepared.model_dir),
        save_dir=str(run.store.root),
        infiniband_root=cluster.infiniband_root,
    )
    needs = needs_of(run.recipe, planned, workers_alive=alive)
    with run.phase(Phase.CLUSTER, run.position.trained, {"planned": asdict(planned)}) as outputs:
        found = survey(run.recipe, needs, query, before=read_ports_before(ports), faults=faults)
        outputs.update(found.to_json())
    publish_cluster(run, outputs)
    for warning in found.hcas.warnings:
        log.warning("InfiniBand: %s", warning)
    for port in found.hcas.excluded:
        log.warning("InfiniBand: %s:%s of %s is left out: %s", port.device, port.port or "*", port.node, port.why)
    if found.hcas.excluded:
        log.warning("every worker gets NCCL_IB_HCA=%s", found.hcas.nccl_ib_hca)
    require(found.problems)
    remember_read(logs, positions)
    write_ports(ports, found.reports)
    return nccl_variables(found.hcas, logs, os.environ)


def check_network(run: Run) -> None:
    """An all-reduce over the trainer ranks, inside each node and over all, once they have started anew.

    Raises BandwidthError for a wrong sum, or for less than `cluster.min_all_reduce_gb_per_s` over all ranks.
    """
    cluster = run.recipe.cluster
    if len(run.trainers) < 2 or not cluster.all_reduce_check_mb or any(worker.attached for worker in run.trainers):
        return
    with run.phase(Phase.NETWORK, run.position.trained) as outputs:
        reply: list[dict[str, Any]] = run.call_trainers("measure_network")[0]
        outputs["all_reduce"] = reply
    last = run.store.ledger.last(Phase.CLUSTER)
    publish_cluster(run, last["outputs"] if last else {}, reply)
    for result in reply:
        get_run_logger().info("all-reduce over %(group)s: %(ranks)d ranks, %(bus_gb_per_s).2f GB/s on the bus", result)
