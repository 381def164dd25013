"""BF16 checkpoint to megatron-core torch_dist, from any number of ranks.

Each rank holds its share of the model (TP x EP over all ranks, as the Kimi-K3 recipe converts on 32) and reads only
its own bytes of the BF16 checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k31core.checkpoint.native import NativeCheckpoint
from k31core.checkpoint.torch_dist import save_torch_dist
from k31core.convert.source import check_free_space, check_target
from k31core.model.build import Build, ExpertFormat
from k31core.model.config import ModelConfig, load_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import IGNORED_PREFIXES, expected_bf16_names
from k31core.parallel.groups import build_mesh, destroy_mesh
from k31core.parallel.mesh import Mesh, stage_layers
from k31core.recipe.train import ParallelRecipe
from k31core.train.base_weights import bf16_slots, model_facts


def bf16_decoder(config: ModelConfig, mesh: Mesh, layers: range | None = None) -> Decoder:
    """This rank's share with BF16 experts, no adapter."""
    build = Build(mesh=mesh, dtype=torch.bfloat16, experts=ExpertFormat.DENSE)
    return Decoder(config, build, layers)


def convert_to_torch_dist(hf_checkpoint: Path, save: Path, layout: ParallelRecipe) -> dict[str, Any]:
    """Run on every rank of an initialised process group; returns the facts written.

    Raises ConfigError for an MXFP4 directory, CheckpointError for a damaged one, LayoutError, ConvertError.
    """
    check_target(hf_checkpoint, save)
    config = load_config(hf_checkpoint, quantized=False)
    checkpoint = NativeCheckpoint(hf_checkpoint)
    checkpoint.check_names(expected_bf16_names(config), IGNORED_PREFIXES)
    mesh = build_mesh(layout)
    try:
        layers = stage_layers(config.num_hidden_layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)[
            mesh.pp.rank
        ]
        slots = bf16_slots(bf16_decoder(config, mesh, layers))
        if dist.get_rank() == 0:
            size = sum(path.stat().st_size for path in hf_checkpoint.glob("*.safetensors"))
            check_free_space(save.parent, size)
        checkpoint.load(slots, progress=dist.get_rank() == 0)
        facts = model_facts(config)
        save_torch_dist(save, slots, mesh, facts)
    finally:
        destroy_mesh()
    return facts
