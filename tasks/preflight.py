"""Stage cluster, before anything is placed: every node is looked at, bad InfiniBand ports are left out."""

import os

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.cluster.node_report import NodeQuery
from k31core.cluster.port_memory import faults_in_logs, left_out_before, nccl_variables
from k31core.cluster.preflight import require
from k31core.cluster.survey import faulted_ports, needs_of, read_ports_before, survey, write_ports
from k31core.observe.ledger import Phase
from tasks.run_directory import Run

PORTS_FILE = "infiniband.json"
LOGS = "logs"
"""NCCL's warnings and the servers' logs, inside the run directory."""


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE, persist_result=False)
def check_cluster(run: Run) -> dict[str, str]:
    """Survey the cluster; returns NCCL's variables for every worker process. Call it while no worker of the run lives.

    Ports that an earlier start of the run left out stay out, unless `cluster.readmit_hcas`. Raises PreflightError
    listing every problem, InfinibandError when too few ports are left.
    """
    assert run.prepared is not None
    cluster = run.recipe.cluster
    ports, logs = run.store.root / PORTS_FILE, run.store.root / LOGS
    logs.mkdir(exist_ok=True)
    last = run.store.ledger.last(Phase.CLUSTER)
    faults = faulted_ports(faults_in_logs(logs))
    faults += left_out_before(last["outputs"]["infiniband"] if last else None, readmit=cluster.readmit_hcas)
    query = NodeQuery(
        node="",
        model_dir=str(run.prepared.model_dir),
        save_dir=str(run.store.root),
        infiniband_root=cluster.infiniband_root,
    )
    with run.phase(Phase.CLUSTER, run.position.trained) as outputs:
        before = read_ports_before(ports)
        found = survey(run.recipe, needs_of(run.recipe), query, before=before, faults=faults)
        outputs.update(found.to_json())
    for warning in found.hcas.warnings:
        get_run_logger().warning("InfiniBand: %s", warning)
    require(found.problems)
    write_ports(ports, found.reports)
    return nccl_variables(found.hcas, logs, os.environ)
