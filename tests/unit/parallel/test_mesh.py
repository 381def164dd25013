"""Stages, shares and layout refusals: each names the two numbers that disagree."""

from dataclasses import replace

import pytest

from k31core.model.config import parse_config
from k31core.model.layout import check_layout
from k31core.model.sizes import KIMI_K31
from k31core.parallel.mesh import Axis, LayoutError, Mesh, stage_layers
from k31core.recipe.train import ParallelRecipe
from tests.model_cases import config_of


def test_stages_of_the_published_recipes() -> None:
    assert [len(r) for r in stage_layers(93, 4, 24, 21)] == [24, 24, 24, 21]
    assert [len(r) for r in stage_layers(93, 2, 47, 46)] == [47, 46]
    assert [len(r) for r in stage_layers(93, 8, 12, 9)] == [12] * 7 + [9]
    assert stage_layers(6, 3) == [range(0, 2), range(2, 4), range(4, 6)]
    assert stage_layers(5, 1) == [range(5)]
    assert stage_layers(7, 2, first=5) == [range(5), range(5, 7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((93, 4), "93 layers do not split over 4 stages"),
        ((10, 2, 4, 5), "1 layers remain for 0 stages"),
        ((4, 3, 2, 2), "0 layers remain for 1 stages"),
        ((4, 2, 5), "-1 layers remain"),
    ],
)
def test_stages_that_do_not_fit(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        stage_layers(*arguments)


def test_shares() -> None:
    assert Axis(4, 3).slice_of(96, "heads") == (72, 24)
    with pytest.raises(LayoutError, match="heads 6 is not divisible by the parallel size 4"):
        Axis(4, 0).slice_of(6, "heads")
    mesh = Mesh(tp=Axis(2, 1), cp=Axis(3, 0), pp=Axis(2, 1))
    assert mesh.token_multiple == 6 and mesh.last_stage and not mesh.first_stage


def test_published_layouts_fit() -> None:
    check_layout(KIMI_K31, ParallelRecipe(tp=4, pp=4, cp=2, ep=8, first_stage_layers=24, last_stage_layers=21))
    check_layout(KIMI_K31, ParallelRecipe(tp=4, pp=2, cp=2, ep=8, first_stage_layers=47, last_stage_layers=46))


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"tp": 4}, None, "MLA heads 6 is not divisible by TP x CP 4"),
        ({"tp": 2, "cp": 3, "ep": 3}, None, "KDA heads 4 is not divisible by TP x CP 6"),
        ({"dp": 3, "ep": 3}, None, "routed experts 8 is not divisible by EP 3"),
        ({"tp": 5}, None, "MLA heads 6 is not divisible by TP x CP 5"),
        ({"pp": 2}, None, "5 layers do not split over 2 stages"),
        ({"tp": 2, "dp": 2}, 8, "= 4 ranks, but the world has 8"),
    ],
)
def test_layouts_that_do_not_fit_the_model(layout: dict, world: int | None, message: str) -> None:
    config = parse_config(config_of(layers=5, mla=(2,), num_attention_heads=6, kda_heads=4))
    with pytest.raises(LayoutError, match=message):
        check_layout(config, ParallelRecipe(**layout), world_size=world)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 94}, "vocabulary 94 is not divisible by TP 4"),
        ({"intermediate_size": 66}, "dense feed-forward width 66 is not divisible by TP 4"),
        ({"moe_intermediate_size": 2, "num_shared_experts": 1}, "shared-expert width 2 is not divisible by TP 4"),
        ({"num_experts": 6}, "routed experts 6 is not divisible by EP 4"),
    ],
)
def test_every_divided_size_is_checked(sizes: dict, message: str) -> None:
    config = parse_config(config_of(layers=4, mla=(2,), num_attention_heads=4, kda_heads=4))
    check_layout(config, ParallelRecipe(tp=4, ep=4))
    with pytest.raises(LayoutError, match=message):
        check_layout(replace(config, **sizes), ParallelRecipe(tp=4, ep=4))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 2, "ep": 4}, r"ep 4 does not divide TP.CP.DP = 2"),
        ({"etp": 2, "tp": 2}, "etp is 2"),
        ({"virtual_pp": 2, "pp": 2}, "virtual_pp"),
    ],
)
def test_the_recipe_refuses_by_itself(layout: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelRecipe(**layout)
