"""BF16 checkpoint to megatron-core torch_dist, from any number of ranks.

Each rank writes its share of the model (TP x EP over all ranks, as the Kimi-K3 recipe converts on 32) straight from
the mapped files, so that no rank holds the model: one process converts what no machine has the memory for.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k31core.checkpoint.native import NativeCheckpoint
from k31core.checkpoint.torch_dist import FACTS, read_facts, save_torch_dist
from k31core.convert.mapped import mapped_slots
from k31core.convert.source import ConvertError, check_free_space, check_target, make_target, open_bf16, read_manifest
from k31core.model.build import Build, ExpertFormat
from k31core.model.config import ModelConfig, load_config
from k31core.model.decoder import Decoder
from k31core.model.layout import check_layout
from k31core.model.weight_names import IGNORED_PREFIXES, expected_bf16_names
from k31core.parallel.groups import build_mesh, destroy_mesh, first_complaint
from k31core.parallel.mesh import Mesh, stage_layers
from k31core.recipe.train import ParallelRecipe
from k31core.train.base_weights import bf16_slots, model_facts


def bf16_decoder(
    config: ModelConfig, mesh: Mesh, layers: range | None = None, device: torch.device | None = None
) -> Decoder:
    """This rank's share with BF16 experts, no adapter."""
    at = device or torch.device("cpu")
    build = Build(mesh=mesh, dtype=torch.bfloat16, device=at, experts=ExpertFormat.DENSE)
    return Decoder(config, build, layers)


def convert_to_torch_dist(hf_checkpoint: Path, save: Path, layout: ParallelRecipe) -> dict[str, Any]:
    """Run on every rank of an initialised process group; returns the facts written.

    A finished conversion of the same checkpoint is returned as it is. Raises ConvertError, ConfigError,
    CheckpointError or LayoutError before anything is written.
    """
    config, checkpoint = open_for_torch_dist(hf_checkpoint, save)
    facts = torch_dist_facts(config, hf_checkpoint)
    check_layout(config, layout, world_size=dist.get_world_size())
    # one rank looks at the target before any of them writes into it
    complaint = _target_complaint(hf_checkpoint, save, facts) if dist.get_rank() == 0 else None
    complaint = first_complaint(complaint)
    if complaint == _FINISHED:
        return facts
    if complaint is not None:
        raise ConvertError(complaint)
    mesh = build_mesh(layout)
    try:
        layers = stage_layers(config.num_hidden_layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)[
            mesh.pp.rank
        ]
        slots = bf16_slots(bf16_decoder(config, mesh, layers, torch.device("meta")))
        save_torch_dist(save, mapped_slots(checkpoint, slots), mesh, facts)
    finally:
        destroy_mesh()
    return facts


def open_for_torch_dist(hf_checkpoint: Path, save: Path) -> tuple[ModelConfig, NativeCheckpoint]:
    """Everything that can be refused without other ranks: the kind of source, its names, its configuration."""
    check_target(hf_checkpoint, save)
    _, checkpoint = open_bf16(hf_checkpoint)
    config = load_config(hf_checkpoint, quantized=False)
    checkpoint.check_names(expected_bf16_names(config), IGNORED_PREFIXES)
    return config, checkpoint


def torch_dist_facts(config: ModelConfig, hf_checkpoint: Path) -> dict[str, Any]:
    """What the result says it holds; `source` is the MXFP4 checkpoint's fingerprint, None where nobody wrote it
    down."""
    manifest = read_manifest(hf_checkpoint)
    return {**model_facts(config), "source": None if manifest is None else manifest.get("source")}


_FINISHED = "finished"


def _target_complaint(hf_checkpoint: Path, save: Path, facts: dict[str, Any]) -> str | None:
    """Why this target cannot be written; `_FINISHED` when it holds just this conversion."""
    try:
        make_target(save)
        if any(save.iterdir()):
            if (save / FACTS).is_file() and read_facts(save) == facts:
                return _FINISHED
            what = "holds the conversion of another checkpoint" if (save / FACTS).is_file() else "is not empty"
            return f"{save} {what}: a conversion writes into a new directory; remove it or give another one"
        check_free_space(save, sum(path.stat().st_size for path in hf_checkpoint.glob("*.safetensors")))
    except ConvertError as error:
        return str(error)
    return None
