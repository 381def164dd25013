"""Named recipes, dotted overrides, and the resolved recipe that a run freezes."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from k31core.recipe.errors import RecipeError
from k31core.recipe.recipe import Recipe
from k31core.recipe.section import Section

RECIPE_DIR = Path(__file__).parents[2] / "deployments" / "recipes"


class ResolvedRecipe(Section):
    """A recipe and what follows from it; this is what `recipe.json` holds."""

    recipe: Recipe
    world_size: int
    """Trainer ranks."""
    data_parallel_size: int
    global_batch_size: int
    candidate_mode: str
    expert_model_parallel_size: int
    max_tokens_per_gpu: int
    colocate_memory_peak_device: str
    lora_base_cpu_backup: bool


def resolve(recipe: Recipe) -> ResolvedRecipe:
    """Derive what follows from a recipe; the recipe itself is not changed."""
    return ResolvedRecipe(
        recipe=recipe,
        world_size=recipe.train.parallel.world_size,
        data_parallel_size=recipe.train.parallel.dp,
        global_batch_size=recipe.global_batch_size,
        candidate_mode=recipe.candidate_mode,
        expert_model_parallel_size=recipe.train.parallel.ep,
        max_tokens_per_gpu=recipe.train.max_tokens_per_gpu,
        colocate_memory_peak_device=recipe.train.colocate_memory_peak_device,
        lora_base_cpu_backup=recipe.rollout.engine.lora_base_cpu_backup,
    )


START_LINES = (
    "expert_model_parallel_size",
    "max_tokens_per_gpu",
    "colocate_memory_peak_device",
    "lora_base_cpu_backup",
)
"""What users look at first to see that a run came up in the intended shape."""


def start_lines(resolved: ResolvedRecipe) -> list[str]:
    """`name value` of `START_LINES`, as they are shown when a run starts."""
    return [f"{name} {getattr(resolved, name)}" for name in START_LINES]


def recipe_names(directory: Path = RECIPE_DIR) -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in directory.glob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Iterable[str] = (), directory: Path = RECIPE_DIR) -> Recipe:
    """Read a recipe by name (or a path to a YAML file) and apply `a.b.c=value` overrides.

    Raises RecipeError for an unknown name, a file that is not YAML, an unknown field or an impossible combination.
    """
    path = Path(name_or_path) if name_or_path.endswith((".yaml", ".yml")) else directory / f"{name_or_path}.yaml"
    if not path.is_file():
        known = recipe_names(directory)
        near = difflib.get_close_matches(name_or_path, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"unknown recipe {name_or_path!r}.{hint} Known: {', '.join(known)}; or give a .yaml file.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe file {path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"recipe file {path} holds a {type(tree).__name__}, expected a mapping of sections")
    for override in overrides:
        _apply_override(tree, override)
    return parse_recipe(tree, str(path))


def override_recipe(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """A recipe with `a.b.c=value` overrides on top, validated again. Raises RecipeError."""
    tree = recipe.model_dump(mode="json")
    for override in overrides:
        _apply_override(tree, override)
    return parse_recipe(tree, f"{recipe.name} (with overrides)")


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Validate a tree of plain values; `where` names it in the error."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"recipe {where} cannot be used:\n" + "\n".join(_explain(error))) from error


def read_resolved(path: Path) -> ResolvedRecipe:
    """Read the frozen recipe of a run (`recipe.json`)."""
    try:
        return ResolvedRecipe.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RecipeError(f"{path} is missing: {path.parent} is not a run directory") from error
    except ValidationError as error:
        raise RecipeError(f"recipe {path} cannot be used:\n" + "\n".join(_explain(error))) from error


def differing_fields(old: Section, new: Section) -> dict[str, tuple[Any, Any]]:
    """Dotted fields whose values differ: `{field: (old, new)}`."""
    a, b = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"override {override!r} is not of the form section.field=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: the value is not YAML ({error})") from error
    if isinstance(value, str):
        value = _as_number(value)
    node = tree
    for key in keys[:-1]:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"override {override!r}: {key!r} is a value, not a section")
        node = child
    node[keys[-1]] = value


def _as_number(text: str) -> str | float:
    """YAML 1.1 reads `1e-5` as a string; users mean a number."""
    try:
        return float(text) if "e" in text.lower() else text
    except ValueError:
        return text


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        field = ".".join(loc) or "recipe"
        if item["type"] == "extra_forbidden":
            lines.append(f"  {field}: unknown field{_suggest(loc)}")
        elif item["type"] == "missing":
            lines.append(f"  {field}: missing, and it has no default")
        else:
            seen = (
                ""
                if isinstance(item["input"], dict | BaseModel)
                else f" (got {json.dumps(item['input'], default=str)})"
            )
            lines.append(f"  {field}: {item['msg'].removeprefix('Value error, ')}{seen}")
    return lines


def _suggest(loc: list[str]) -> str:
    model: Any = Recipe
    for part in loc[:-1]:
        info = model.model_fields.get(part)
        candidates = [] if info is None else [info.annotation, *getattr(info.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)
        if model is None:
            return ""
    near = difflib.get_close_matches(loc[-1], model.model_fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(model.model_fields)}"
