"""Whether a model divides over a layout: asked before anything is built or loaded."""

from k31core.model.config import ModelConfig
from k31core.parallel.mesh import LayoutError, stage_layers
from k31core.recipe.train import ParallelRecipe


def check_layout(config: ModelConfig, layout: ParallelRecipe, *, world_size: int | None = None) -> None:
    """Raise `LayoutError` naming the two numbers that disagree.

    Expert-TP other than 1, a virtual pipeline, and EP that does not fit a stage are refused by the recipe already.
    """
    if world_size is not None and layout.world_size != world_size:
        raise LayoutError(
            f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp} = {layout.world_size} ranks, "
            f"but the world has {world_size}"
        )
    divided = (
        ("MLA heads", config.num_attention_heads, "TP x CP", layout.tp * layout.cp),
        ("KDA heads", config.kda_num_heads, "TP x CP", layout.tp * layout.cp),
        ("vocabulary", config.vocab_size, "TP", layout.tp),
        ("dense feed-forward width", config.intermediate_size, "TP", layout.tp),
        ("shared-expert width", config.shared_intermediate_size, "TP", layout.tp),
        ("routed experts", config.num_experts, "EP", layout.ep),
    )
    for what, total, axis, size in divided:
        if total % size:
            raise LayoutError(f"{what} {total} is not divisible by {axis} {size}")
    stage_layers(config.num_hidden_layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)
