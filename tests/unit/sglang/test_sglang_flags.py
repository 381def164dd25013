"""The command line of every shipped recipe, against what SGLang's own parser accepts."""

import argparse
import json
from typing import Any

import pytest

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import load_recipe
from k31core.rollout.engines.sglang.flags import (
    FLAGS,
    Place,
    differences,
    field_value,
    lora_target_modules,
    server_args,
    server_environment,
)
from k31core.rollout.engines.sglang.versions import Abilities
from tests.unit.sglang.sglang_source import RECORD, in_sglang

KNOWN = json.loads(RECORD.read_text())
NEW = Abilities("0.5.23", k3_model=True, k31_model=True, k3_moe_lora=True, partial_attention_dp_lora=True)
OLD = Abilities("0.5.17", k3_model=True, k31_model=True, k3_moe_lora=True, partial_attention_dp_lora=True)
SGLANG_RECIPES = ["k31-32xh200", "k31-16xb300", "k3-64xgb300", "k3-4layer"]


def recorded_parser() -> argparse.ArgumentParser:
    """A parser with the options of the record."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    for option, facts in KNOWN["options"].items():
        kind: dict[str, Any] = {"nargs": "*"} if facts["takes_value"] else {"action": "store_true"}
        parser.add_argument(option, **kind)
    return parser


def parse(args: list[str]) -> dict[str, Any]:
    """Refuse what the record does not know, choices included; returns what was given."""
    known, unknown = recorded_parser().parse_known_args(args)
    assert unknown == []
    given = {}
    for option, facts in KNOWN["options"].items():
        value = getattr(known, option.removeprefix("--").replace("-", "_"))
        if value in (None, False):
            continue
        given[option] = value
        for word in value if isinstance(value, list) else []:
            assert facts["choices"] is None or word in facts["choices"], f"{option} {word}"
    return given


@pytest.mark.parametrize("name", SGLANG_RECIPES)
def test_every_recipe_is_accepted(name: str) -> None:
    parse(server_args(load_recipe(name), "/models/x", NEW, Place()))


def test_the_h200_recipe_says_what_the_published_launcher_says() -> None:
    given = parse(server_args(load_recipe("k31-32xh200"), "/models/Kimi-K3.1", NEW, Place(0, 2, "10.0.0.1")))
    expected = {
        "--model-path": ["/models/Kimi-K3.1"],
        "--tp-size": ["32"],
        "--ep-size": ["32"],
        "--attn-dp-size": ["4"],
        "--moe-runner-backend": ["marlin"],
        "--lora-backend": ["triton"],
        "--kv-cache-dtype": ["bfloat16"],
        "--max-total-tokens": ["262144"],
        "--load-balance-method": ["total_requests"],
        "--enable-weights-cpu-backup": True,
        "--experts-shared-outer-loras": True,
        "--enable-return-routed-experts": True,
        "--enable-memory-saver": True,
        "--enable-lora": True,
        "--max-lora-rank": ["32"],
        "--skip-tokenizer-init": True,
        "--nnodes": ["4"],
        "--node-rank": ["2"],
        "--host": ["10.0.0.1"],
        "--dist-init-addr": ["10.0.0.1:30050"],
    }
    assert {option: given[option] for option in expected} == expected
    assert "--enable-return-indexer-topk" not in given


def test_the_b300_recipe_keeps_no_host_copy() -> None:
    given = parse(server_args(load_recipe("k31-16xb300"), "m", NEW, Place()))
    assert "--enable-weights-cpu-backup" not in given
    assert (given["--attn-dp-size"], given["--max-total-tokens"], given["--nnodes"]) == (["2"], ["524288"], ["2"])


def test_k3_leaves_to_the_server_what_its_recipe_leaves_open() -> None:
    recipe = load_recipe("k3-64xgb300")
    given = parse(server_args(recipe, "m", NEW, Place(engine=3)))
    for option in ("--moe-runner-backend", "--lora-backend", "--kv-cache-dtype", "--load-balance-method"):
        assert option not in given
    assert "--attn-dp-size" not in given
    assert "--enable-return-routed-experts" not in given
    assert (given["--ep-size"], given["--port"], recipe.nodes_per_engine) == (["1"], ["30300"], 4)


def test_an_old_sglang_gets_the_old_spelling_of_attention_dp() -> None:
    args = server_args(load_recipe("k31-32xh200"), "m", OLD, Place())
    assert "--attn-dp-size" not in args
    assert args[args.index("--dp-size") + 1] == "4"
    assert "--enable-dp-attention" in args


def test_every_switch_of_the_table_follows_its_field() -> None:
    on = load_recipe("k31-32xh200", ["rollout.indexer_replay=true"])
    off = load_recipe("k31-32xh200", ["rollout.engine.lora_base_cpu_backup=false", "sync.resend_base=true"])
    apart = load_recipe(
        "k31-32xh200", ["rollout.routing_replay=false", "cluster.colocate=false", "sync.transport=shared_files"]
    )
    for flag in FLAGS:
        if flag.kind == "switch":
            for recipe in (on, off, apart):
                assert (flag.option in server_args(recipe, "m", NEW, Place())) == bool(field_value(recipe, flag.field))


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ("--tp-size=8", r"rollout\.engine\.tp_size"),
        ("--tp", r"rollout\.engine\.tp_size"),
        ("--enable-memory-saver", r"cluster\.colocate"),
        ("--attn-dp-size", r"rollout\.engine\.attn_dp_size"),
        ("--dp", r"rollout\.engine\.attn_dp_size"),
        ("--lora-target-modules", r"train\.lora\.target_modules"),
    ],
)
def test_an_extra_argument_cannot_contradict_the_recipe(extra: str, field: str) -> None:
    recipe = load_recipe("k31-32xh200", [f"rollout.engine.extra_args=['{extra}']"])
    with pytest.raises(RecipeError, match=f"extra_args has '{extra}', which {field} already decides"):
        server_args(recipe, "m", NEW, Place())


def test_extra_arguments_are_passed_as_they_are() -> None:
    recipe = load_recipe("k31-32xh200", ["rollout.engine.extra_args=['--chunked-prefill-size', '4096']"])
    args = server_args(recipe, "m", NEW, Place())
    assert args[-2:] == ["--chunked-prefill-size", "4096"]
    parse(args)


def test_engines_that_share_a_node_take_different_cards() -> None:
    recipe = load_recipe("k3-4layer", ["rollout.engine.tp_size=2", "rollout.engine.ep_size=2"])
    assert (recipe.num_engines, recipe.nodes_per_engine) == (4, 1)
    seen = [parse(server_args(recipe, "m", NEW, Place(engine=i))) for i in range(4)]
    assert [given["--base-gpu-id"] for given in seen] == [["0"], ["2"], ["4"], ["6"]]
    assert [given["--host"] for given in seen] == [["127.0.0.1"]] * 4
    assert len({given["--port"][0] for given in seen}) == 4


def test_lora_targets() -> None:
    every = ["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert lora_target_modules(load_recipe("k31-32xh200")) == every
    assert lora_target_modules(load_recipe("k3-64xgb300")) == every
    assert lora_target_modules(load_recipe("tiny", ["train.lora.target_modules=[o_proj]"])) == ["o_proj"]


def test_environment_of_the_recipes() -> None:
    k31 = server_environment(load_recipe("k31-32xh200"), {"PATH": "/bin"})
    assert (k31["NCCL_RAS_ENABLE"], k31["SGLANG_DSA_TOPK_BROADCAST"], k31["PATH"]) == ("0", "1", "/bin")
    assert "SGLANG_K3_ATTN_RES_MODE" not in k31
    k3 = server_environment(load_recipe("k3-64xgb300"), {})
    assert "SGLANG_K3_ATTN_RES_MODE" not in k3
    assert "SGLANG_DSA_TOPK_BROADCAST" not in k3
    assert server_environment(load_recipe("k3-4layer"), {}, "NVIDIA H200")["SGLANG_K3_ATTN_RES_MODE"] == "jit"
    assert "SGLANG_K3_ATTN_RES_MODE" not in server_environment(load_recipe("k3-4layer"), {}, "NVIDIA GB300")


def test_broadcast_is_set_even_where_the_recipe_forgets_it() -> None:
    recipe = load_recipe("k31-32xh200", ["env.variables={}"])
    environment = server_environment(recipe, {})
    assert (environment["NCCL_RAS_ENABLE"], environment["SGLANG_DSA_TOPK_BROADCAST"]) == ("0", "1")


def test_the_recipes_own_variables_and_tree_win() -> None:
    recipe = load_recipe(
        "k31-32xh200", ["env.variables.NCCL_DEBUG=INFO", "rollout.engine.sglang_path=/sgl-workspace/sglang/python"]
    )
    environment = server_environment(recipe, {"PYTHONPATH": "/x", "NCCL_DEBUG": "WARN"})
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["PYTHONPATH"] == "/sgl-workspace/sglang/python:/x"


def test_a_running_server_is_compared_with_the_recipe() -> None:
    recipe = load_recipe("k31-32xh200")
    info = {flag.attribute: field_value(recipe, flag.field) for flag in FLAGS}
    assert differences(recipe, info) == []
    wrong = differences(recipe, info | {"tp_size": 16, "enable_weights_cpu_backup": False})
    assert wrong == [
        "--tp-size: the server has 16, rollout.engine.tp_size is 32",
        "--enable-weights-cpu-backup: the server has False, rollout.engine.lora_base_cpu_backup is True",
    ]


@pytest.mark.slow
def test_sglangs_own_parser_accepts_every_recipe() -> None:
    """The real parser, and that our switches land in the settings we compare a running server with."""
    recipes = [load_recipe(name) for name in SGLANG_RECIPES]
    lines = [server_args(recipe, "/models/x", NEW, Place()) for recipe in recipes]
    parsed = in_sglang(
        f"import json; p = S.parser(); seen = [vars(p.parse_args(line)) for line in {lines!r}]; "
        f"kinds = (int, str, float, bool, type(None)); "
        f"print(json.dumps([{{k: v for k, v in s.items() if isinstance(v, kinds)}} for s in seen]))"
    )
    for recipe, settings in zip(recipes, parsed, strict=True):
        assert differences(recipe, settings) == []
        assert settings["attn_dp_size"] == recipe.rollout.engine.attn_dp_size
        assert {flag.attribute for flag in FLAGS} <= settings.keys()
