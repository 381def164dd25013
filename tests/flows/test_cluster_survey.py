"""Three real Ray nodes on this machine, surveyed; each has its own fixture of InfiniBand ports."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from k31core.cluster.infiniband import BadPort, InfinibandError
from k31core.cluster.node_report import NodeQuery
from k31core.cluster.preflight import PreflightError, require
from k31core.cluster.survey import needs_of, read_ports_before, survey, write_ports
from k31core.recipe.load import load_recipe
from tests.unit.cluster.sysfs_tree import DOWN, write_hcas, write_port
from tests.unit.cluster.test_node_report import write_checkpoint

pytestmark = [pytest.mark.flows, pytest.mark.timeout(600)]
RECIPE = load_recipe("tiny", ["cluster.num_nodes=3", "cluster.min_hcas_per_node=3", "cluster.bringup_timeout_s=90"])


def start_head(small: dict[str, Any]) -> Cluster:
    """A cluster of one node."""
    return tried(lambda: Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False}))


def add_nodes(cluster: Cluster, count: int, small: dict[str, Any]) -> None:
    """More nodes on this machine."""
    for _ in range(count):
        tried(lambda: cluster.add_node(**small))


def tried(start: Callable[[], Any]) -> Any:
    """Ray gives a new node 30 s, which a busy machine does not always keep: three tries."""
    for left in (2, 1, 0):
        try:
            return start()
        except Exception as error:  # Ray raises nothing narrower
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[None]:
    small = {"num_cpus": 1, "object_store_memory": 80 * 1024**2, "include_log_monitor": False, "no_monitor": True}
    cluster = start_head(small)
    try:
        add_nodes(cluster, 2, small)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes(timeout=120)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_healthy_then_a_flap_then_a_fault_from_the_log(three_nodes: None, tmp_path: Path) -> None:
    """A start, and resumes after a flapping port, after NCCL's own word, and with too few ports left."""
    write_checkpoint(tmp_path / "model", {"a.safetensors": b"1"})
    roots: dict[str, Path] = {}

    def own_root(query: NodeQuery) -> NodeQuery:
        root = roots.setdefault(query.node, tmp_path / f"ib-{len(roots)}")
        if not root.exists():
            write_hcas(root, 4)
        return replace(query, infiniband_root=str(root))

    query = NodeQuery("", model_dir=str(tmp_path / "model"), save_dir=str(tmp_path / "save"))
    first = survey(RECIPE, needs_of(RECIPE), query, query_of=own_root)
    require(first.problems)
    assert len(first.reports) == 3
    assert first.hcas.nccl_ib_hca is None
    assert all(report.token_text for report in first.reports)
    assert list((tmp_path / "save").iterdir()) == []
    write_ports(tmp_path / "ports.json", first.reports)

    flapping = first.reports[1].node
    write_port(roots[flapping], "mlx5_2", counters={"link_downed": 1})
    before = read_ports_before(tmp_path / "ports.json")
    second = survey(RECIPE, needs_of(RECIPE), query, before=before, query_of=own_root)
    assert second.hcas.nccl_ib_hca == "^=mlx5_2:1"
    assert [(bad.node, bad.why) for bad in second.hcas.excluded] == [(flapping, "flapping: link_downed 0->1")]
    assert second.to_json()["infiniband"]["nccl_ib_hca"] == "^=mlx5_2:1"

    fault = BadPort(first.reports[0].node, "mlx5_0", 0, "IBV_WC_RETRY_EXC_ERR (peer 10.0.0.1)")
    third = survey(RECIPE, needs_of(RECIPE), query, faults=[fault], query_of=own_root)
    assert third.hcas.nccl_ib_hca == "^=mlx5_0:1"

    write_port(roots[first.reports[2].node], "mlx5_3", **DOWN)
    with pytest.raises(InfinibandError, match=rf"node {first.reports[2].node}: 2 usable of 4 ports, 3 needed"):
        survey(RECIPE, needs_of(RECIPE), query, faults=[fault], query_of=own_root)


def test_a_node_with_another_checkpoint_and_one_without_the_shared_directory(three_nodes: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", {"a.safetensors": b"1"})
    write_checkpoint(tmp_path / "other", {"a.safetensors": b"22"})
    seen: list[str] = []

    def changed(query: NodeQuery) -> NodeQuery:
        seen.append(query.node)
        if len(seen) == 2:
            query = replace(query, model_dir=str(tmp_path / "other"))
        if len(seen) == 3:
            query = replace(query, save_dir=str(tmp_path / "not-shared"))
        return replace(query, infiniband_root=str(tmp_path / "none"))

    recipe = load_recipe("tiny", ["cluster.num_nodes=4", "cluster.bringup_timeout_s=90"])
    query = NodeQuery("", model_dir=str(tmp_path / "model"), save_dir=str(tmp_path / "save"))
    found = survey(recipe, needs_of(recipe), query, query_of=changed)
    with pytest.raises(PreflightError) as error:
        require(found.problems)
    text = str(error.value)
    assert "cluster: 3 of 4 nodes answered" in text
    assert f"{seen[1]}: checkpoint digest is" in text
    assert f"{seen[2]}: the save directory is not the shared one" in text
    assert len(found.problems) == 3
