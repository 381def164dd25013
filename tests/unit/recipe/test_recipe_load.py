"""Names, overrides and files: what a user can get wrong before any field is looked at."""

import json
from pathlib import Path

import pytest

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import differing_fields, load_recipe, parse_recipe, read_resolved, resolve


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe 'k31-32xh20'. Did you mean 'k31-32xh200'\? Known: .*tiny"):
        load_recipe("k31-32xh20")


def test_unknown_field_is_named_with_a_suggestion() -> None:
    with pytest.raises(
        RecipeError, match=r"rollout\.prompts_per_stp: unknown field; did you mean 'prompts_per_step'\?"
    ):
        load_recipe("tiny", ["rollout.prompts_per_stp=4"])


def test_unknown_field_deep_in_the_tree_is_suggested_from_its_own_section() -> None:
    with pytest.raises(RecipeError, match=r"train\.optimizer\.learning_rat: unknown field.*weight_decay"):
        load_recipe("tiny", ["train.optimizer.learning_rat=1"])


def test_missing_field_is_named() -> None:
    with pytest.raises(RecipeError, match=r"model: missing, and it has no default"):
        parse_recipe({"name": "x"}, "here")


@pytest.mark.parametrize(
    ("override", "expected"),
    [("train.optimizer.lr=1e-5", 1e-5), ("train.optimizer.lr=0.001", 0.001), ("train.optimizer.lr=3", 3.0)],
)
def test_numbers_of_an_override(override: str, expected: float) -> None:
    assert load_recipe("tiny", [override]).train.optimizer.lr == expected


def test_an_override_can_switch_off_and_add_a_section() -> None:
    recipe = load_recipe("k31-16xb300", ["rollout.dynamic_sampling=null", "env.variables.NCCL_DEBUG=INFO"])
    assert recipe.rollout.dynamic_sampling is None
    assert recipe.env.variables["NCCL_DEBUG"] == "INFO"
    assert recipe.env.variables["NCCL_RAS_ENABLE"] == "0"


def test_a_later_override_wins() -> None:
    assert load_recipe("tiny", ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1", ".seed=1"])
def test_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(RecipeError, match=r"is not of the form section\.field=value"):
        load_recipe("tiny", [override])


def test_override_below_a_value_is_refused() -> None:
    with pytest.raises(RecipeError, match="'seed' is a value, not a section"):
        load_recipe("tiny", ["seed.x=1"])


@pytest.mark.parametrize(("text", "message"), [("a: [1", "is not YAML"), ("- 1", "holds a list"), ("", "NoneType")])
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(str(path))


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(load_recipe("tiny", ["name=mine"]).model_dump(mode="json")))
    assert load_recipe(str(path)).name == "mine"


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("tiny").seed = 3  # type: ignore[misc]


def test_the_resolved_recipe_survives_the_disk(tmp_path: Path) -> None:
    resolved = resolve(load_recipe("k31-32xh200"))
    path = tmp_path / "recipe.json"
    path.write_text(resolved.model_dump_json())
    assert read_resolved(path) == resolved


def test_a_resolved_recipe_of_another_version_is_refused(tmp_path: Path) -> None:
    tree = resolve(load_recipe("tiny")).model_dump(mode="json")
    tree["recipe"]["rollout"]["turbo"] = True
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(RecipeError, match=r"recipe\.rollout\.turbo: unknown field"):
        read_resolved(path)
    with pytest.raises(RecipeError, match="is not a run directory"):
        read_resolved(tmp_path / "absent" / "recipe.json")


def test_differing_fields_names_both_values() -> None:
    old, new = load_recipe("tiny"), load_recipe("tiny", ["seed=7", "env.variables.A=b"])
    assert differing_fields(old, new) == {
        "seed": (0, 7),
        "env.variables": ({}, None),
        "env.variables.A": (None, "b"),
    }
