"""The plan's bytes reach the look at the nodes: too small a card, host or disk is named before anything loads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from k31core.cluster.preflight import check_nodes
from k31core.cluster.survey import ByteNeeds, needs_of
from k31core.model.config import load_config
from k31core.plan.plan import make_plan
from k31core.recipe.load import load_recipe
from tasks.planned_bytes import planned_bytes, save_bytes
from tests.model_cases import config_of
from tests.unit.cluster.test_preflight import CLOCK, HEALTHY

GPU = ["train.device=cuda", "cluster.gpus_per_node=1", "train.lora.rank=4", "train.lora.alpha=8"]


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root


def test_cards_hosts_and_disk_of_the_plan_become_problems_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(layers=4, mla=(4,))))
    recipe = load_recipe("tiny", GPU)
    planned = planned_bytes(recipe, tmp_path, Store(tmp_path))
    plan = make_plan(recipe, load_config(tmp_path))
    assert planned.gpu_memory_bytes == plan.totals["card_peak"]
    assert planned.host_memory_bytes == max(host.total for host in plan.hosts)
    assert planned.save_free_bytes == save_bytes(recipe, int(plan.totals["adapter_parameters"]))

    needs = replace(needs_of(recipe, planned), accelerator=None)
    small = replace(
        HEALTHY[0],
        gpus=(replace(HEALTHY[0].gpus[0], memory_total_mib=needs.gpu_memory_mib - 1),),
        memory_total_bytes=planned.host_memory_bytes - 1,
        save_free_bytes=planned.save_free_bytes - 1,
        token_text=None,
    )
    found = [problem.what for problem in check_nodes([small], needs, CLOCK)]
    assert len(found) == 3, found
    assert f"GPU 0 has {needs.gpu_memory_mib - 1} MiB, the plan needs {needs.gpu_memory_mib}" in found
    enough = replace(
        small, gpus=(replace(HEALTHY[0].gpus[0], memory_total_mib=needs.gpu_memory_mib),),
        memory_total_bytes=planned.host_memory_bytes, save_free_bytes=planned.save_free_bytes,
    )  # fmt: skip
    assert check_nodes([enough], needs, CLOCK) == []


def test_a_run_on_the_cpu_is_judged_by_its_disk_and_one_without_sizes_not_at_all(tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    (tmp_path / "config.json").write_text(json.dumps(config_of(layers=4, mla=(4,))))
    planned = planned_bytes(recipe, tmp_path, Store(tmp_path))
    assert planned.gpu_memory_bytes == planned.host_memory_bytes == 0 < planned.save_free_bytes
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "saved").write_bytes(b"x" * 1000)
    assert planned_bytes(recipe, tmp_path, Store(tmp_path)).save_free_bytes == planned.save_free_bytes - 1000
    (tmp_path / "config.json").write_text('{"vocab_size": 32}')
    assert planned_bytes(recipe, tmp_path, Store(tmp_path)) == ByteNeeds()


@pytest.mark.parametrize(
    ("overrides", "gigabytes"),
    [
        ([], 3 * 49.0),  # two kept and one being written; nothing published goes through files
        (["save.optimizer=true"], 3 * (49.0 + 294.0)),
        (["save.keep_every=50"], 5 * 49.0),
        (["sync.transport=shared_files"], (3 + 3) * 49.0),
        (["save.skip_saving=true"], 0.0),
    ],
)
def test_saves_of_the_full_recipe(overrides: list[str], gigabytes: float) -> None:
    parameters = 24_512_544_768
    assert save_bytes(load_recipe("k31-32xh200", overrides), parameters) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_cards_that_this_run_itself_fills_are_no_problem() -> None:
    recipe = load_recipe("k31-32xh200")
    busy = [
        replace(n, gpus=tuple(replace(g, memory_used_mib=90_000) for g in n.gpus), token_text=None) for n in HEALTHY
    ]
    assert len(check_nodes(busy, needs_of(recipe), CLOCK)) == 32
    assert check_nodes(busy, needs_of(recipe, workers_alive=True), CLOCK) == []
