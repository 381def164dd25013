"""Each fault of a cluster alone, and that a healthy one has none."""

from dataclasses import replace

import pytest

from k31core.cluster.infiniband import NodePorts, Port
from k31core.cluster.node_report import Gpu, NodeReport
from k31core.cluster.preflight import (
    Needs,
    PreflightError,
    check_nodes,
    require,
    stale_placement_groups,
)

NEEDS = Needs(
    num_nodes=4,
    gpus_per_node=8,
    accelerator="H200",
    save_free_bytes=100 * 10**9,
    host_memory_bytes=1483 * 10**9,
    gpu_memory_mib=133_000,
    token_text="hello",
)
CLOCK = (1000.0, 1010.0)


def node(name: str) -> NodeReport:
    gpus = tuple(Gpu(i, "NVIDIA H200", f"GPU-{name}-{i}", 143771, 4) for i in range(8))
    port = Port("mlx5_0", 1, "ACTIVE", "LinkUp", "InfiniBand", "400 Gb/sec (4X NDR)", {})
    return NodeReport(
        node=name,
        architecture="x86_64",
        python="3.12.1",
        gpus=gpus,
        driver="570.86.15",
        nccl="2.30.7",
        ports=NodePorts(name, 1005.0, (port,)),
        memory_total_bytes=2000 * 10**9,
        memory_available_bytes=1900 * 10**9,
        shm_free_bytes=10**12,
        locked_memory_limit_bytes=None,
        save_free_bytes=10**13,
        checkpoint_digest="d" * 64,
        checkpoint_bytes=1_560_860_324_864,
        image="v7",
        started_at=1004.0,
        finished_at=1005.0,
        token_text="hello",
    )


HEALTHY = [node(f"n{i}") for i in range(4)]


def test_a_healthy_cluster_has_no_problem() -> None:
    assert check_nodes(HEALTHY, NEEDS, CLOCK) == []
    require([])


FAULTS = {
    "fewer GPUs": (
        {"gpus": HEALTHY[2].gpus[:7], "unread": {"gpus": "card 7 lost"}},
        r"7 GPUs, the recipe needs 8 \(card 7 lost\)",
    ),
    "driver": ({"driver": "560.35.03"}, r"driver is 560\.35\.03, on n0 it is 570\.86\.15.*install the same driver"),
    "nccl": ({"nccl": "2.27.5"}, r"NCCL is 2\.27\.5, on n0 it is 2\.30\.7"),
    "image": ({"image": None}, r"image version is unknown, on n0 it is v7"),
    "architecture": ({"architecture": "aarch64"}, r"architecture is aarch64"),
    "digest": ({"checkpoint_digest": "e" * 64}, r"checkpoint digest is eeee.*on n0 it is dddd.*k31 verify-model"),
    "slow clock": ({"started_at": 995.0, "finished_at": 996.0}, r"its clock is off by at least 5\.0 s"),
    "fast clock": ({"started_at": 1019.0, "finished_at": 1020.0}, r"its clock is off by at least 10\.0 s"),
    "disk": ({"save_free_bytes": 10**10}, r"10\.0 GB free in the save directory, the saves need 100\.0 GB"),
    "host memory": ({"memory_total_bytes": 10**12}, r"1000 GB of host memory, the run peaks at 1483 GB"),
    "token": ({"token_text": "old"}, r"the save directory is not the shared one \(read 'old' instead of 'hello'\)"),
    "memlock": ({"locked_memory_limit_bytes": 65536}, r"limited to 65536 bytes.*--ulimit memlock=-1"),
    "card in use": (
        {"gpus": (replace(HEALTHY[2].gpus[0], memory_used_mib=30000), *HEALTHY[2].gpus[1:])},
        r"GPU 0 already holds 30000 MiB of another process",
    ),
    "small card": (
        {"gpus": (*HEALTHY[2].gpus[:7], replace(HEALTHY[2].gpus[7], memory_total_mib=81559))},
        r"GPU 7 has 81559 MiB, the plan needs 133000",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_its_node_and_nothing_else(fault: str) -> None:
    change, message = FAULTS[fault]
    nodes = [*HEALTHY[:2], replace(HEALTHY[2], **change), HEALTHY[3]]
    problems = check_nodes(nodes, NEEDS, CLOCK)
    assert [p.node for p in problems] == ["n2"]
    with pytest.raises(PreflightError, match=message):
        require(problems)


def test_no_checkpoint_names_the_missing_file() -> None:
    broken = replace(HEALTHY[0], checkpoint_digest=None, unread={"checkpoint": "x/index.json: no such file"})
    texts = [str(p) for p in check_nodes([broken, *HEALTHY[1:]], NEEDS, CLOCK)]
    assert any("n0: no usable checkpoint (x/index.json: no such file). run `k31/prepare`" in t for t in texts)


def test_a_missing_node_is_a_problem_of_the_cluster() -> None:
    (problem,) = check_nodes(HEALTHY[:3], NEEDS, CLOCK)
    assert problem.node == "cluster"
    assert "3 of 4 nodes answered (n0, n1, n2)" in problem.what
    assert "ray start --address" in problem.next_step


@pytest.mark.parametrize(("wanted", "card"), [("B300", "NVIDIA GB300"), ("H200", "NVIDIA H100 80GB HBM3")])
def test_another_card_is_refused(wanted: str, card: str) -> None:
    gpus = tuple(replace(gpu, name=card) for gpu in HEALTHY[0].gpus)
    nodes = [replace(report, gpus=gpus) for report in HEALTHY]
    problems = check_nodes(nodes, replace(NEEDS, accelerator=wanted), CLOCK)
    assert len(problems) == 32
    assert f"GPU 0 is '{card}', the recipe is for {wanted}" in problems[0].what


def test_hyphenated_card_names_match() -> None:
    gpus = tuple(replace(gpu, name="NVIDIA H200-SXM") for gpu in HEALTHY[0].gpus)
    assert check_nodes([replace(report, gpus=gpus) for report in HEALTHY], NEEDS, CLOCK) == []


def test_all_problems_are_listed_at_once() -> None:
    nodes = [replace(HEALTHY[0], driver="1"), replace(HEALTHY[1], save_free_bytes=0), *HEALTHY[2:]]
    with pytest.raises(PreflightError) as error:
        require(check_nodes(nodes, NEEDS, CLOCK))
    assert "2 problems" in str(error.value)
    assert "n0: driver" in str(error.value)
    assert "n1: 0.0 GB free" in str(error.value)


def test_stale_placement_groups_of_other_runs() -> None:
    groups = {"k31:/runs/a": "CREATED", "k31:/runs/b": "CREATED", "k31:/runs/c": "REMOVED", "other": "CREATED"}
    (problem,) = stale_placement_groups(groups, "/runs/b")
    assert "'k31:/runs/a' (CREATED)" in problem.what
    assert "resume or end that run (/runs/a)" in problem.next_step
