"""A transport that does not fit the engine or the cards is refused when the recipe is read."""

import pytest

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("tiny", ["sync.transport=cuda_ipc"], "'cuda_ipc' needs an SGLang engine"),
        ("tiny", ["sync.transport=nccl"], "'nccl' needs an SGLang engine"),
        ("k31-32xh200", ["sync.transport=in_process"], "'in_process' needs the embedded engine"),
        ("k31-32xh200", ["cluster.colocate=false"], "memory of a card that trainer and engine share"),
        ("k31-32xh200", ["sync.transport=nccl"], "one card cannot be two ranks of a group"),
        ("k31-32xh200", ["sync.transport=nccl", "cluster.colocate=false"], "there are 1 engines of 4 nodes"),
        ("k3-64xgb300", ["sync.transport=nccl", "cluster.colocate=false"], "there are 4 engines of 4 nodes"),
        ("k31-16xb300", ["sync.transport=shared_files"], "sync.resend_base streams the base by handle"),
        ("k31-32xh200", ["sync.check_lora_weight_equal=true"], "set sync.expert_rows: all"),
    ],
)
def test_refused(recipe: str, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, overrides)


def test_accepted() -> None:
    load_recipe("k31-32xh200", ["sync.check_lora_weight_equal=true", "sync.expert_rows=all"])
    load_recipe("k31-32xh200", ["sync.transport=shared_files", "cluster.colocate=false"])
    load_recipe("k3-4layer", ["sync.transport=nccl", "cluster.colocate=false"])
