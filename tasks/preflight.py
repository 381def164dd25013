"""Stage cluster, before anything is placed: every node is looked at, bad InfiniBand ports are left out."""

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from k31core.cluster.node_report import NodeQuery
from k31core.cluster.preflight import require
from k31core.cluster.survey import needs_of, read_ports_before, survey, write_ports
from k31core.observe.ledger import Phase
from tasks.run_directory import Run

PORTS_FILE = "infiniband.json"


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE, persist_result=False)
def check_cluster(run: Run) -> dict[str, str]:
    """Survey the cluster; returns variables for every worker process (`NCCL_IB_HCA` where ports are left out).

    Raises PreflightError listing every problem, InfinibandError when too few ports are left.
    """
    assert run.prepared is not None
    ports = run.store.root / PORTS_FILE
    with run.phase(Phase.CLUSTER, run.position.trained) as outputs:
        query = NodeQuery(node="", model_dir=str(run.prepared.model_dir), save_dir=str(run.store.root))
        found = survey(run.recipe, needs_of(run.recipe), query, before=read_ports_before(ports))
        outputs.update(found.to_json())
    for warning in found.hcas.warnings:
        get_run_logger().warning("InfiniBand: %s", warning)
    require(found.problems)
    write_ports(ports, found.reports)
    return {} if found.hcas.nccl_ib_hca is None else {"NCCL_IB_HCA": found.hcas.nccl_ib_hca}
