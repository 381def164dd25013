"""A gradient that is not finite on one rank stops the step on every rank, by name, with nothing changed."""

from pathlib import Path

import pytest
import torch

from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.lora import init_adapter, trainable_slots
from k31core.model.weight_names import base_slots
from k31core.parallel.groups import build_mesh
from k31core.parallel.mesh import stage_layers
from k31core.recipe.train import ParallelRecipe
from k31core.rl.losses import LossChoice
from k31core.train.adamw import AdamSettings, AdamW
from k31core.train.batch import loss_token_count, make_microbatches
from k31core.train.gradients import NonFiniteGradientError
from k31core.train.pipeline import run_pipelined
from k31core.train.step import StepSettings, optimizer_step, run_in_order
from tests.model_cases import config_of, write_checkpoint
from tests.parity.ranks import run_ranks
from tests.parity.step import limits_of, random_samples

FAULTY = "language_model.model.layers.3.block_sparse_moe.experts.w1.lora_B.weight"


def poisoned_step(rank: int, world: int, model: Path, layout: ParallelRecipe, faulty: int) -> tuple[str, bool]:
    """(what was raised, whether adapter and optimizer are as before); rank `faulty` gets an infinity."""
    mesh, config = build_mesh(layout), load_config(model)
    layers = stage_layers(config.num_hidden_layers, layout.pp)[mesh.pp.rank]
    decoder = Decoder(config, Build(mesh=mesh, lora=LoraSpec(2, 4.0)), layers)
    NativeCheckpoint(model).load(base_slots(decoder), progress=False)
    init_adapter(decoder)
    optimizer = AdamW(trainable_slots(decoder), AdamSettings(0.9, 0.98, 1e-8, 0.1))
    state = [slot.tensor.detach().clone() for slot in (*optimizer.slots, *optimizer.state_slots())]
    samples = random_samples(config, [(3, 5), (2, 4), (2, 2)])

    def schedule(decoder, batches, head_loss):
        outputs = (run_pipelined if mesh.pp.size > 1 else run_in_order)(decoder, batches, head_loss)
        if rank == faulty:
            (slot,) = (slot for slot in optimizer.slots if slot.name == FAULTY)
            slot.tensor.grad.view(-1)[7] = float("inf")
        return outputs

    try:
        optimizer_step(
            decoder,
            optimizer,
            make_microbatches(samples, limits_of(config), mesh=mesh, tokens_per_gpu=32),
            StepSettings(LossChoice("score_centering"), temperature=1.0, logprob_chunk_tokens=16, clip_grad=1.0),
            normaliser=loss_token_count(samples),
            lr=0.01,
            schedule=schedule,
        )
    except NonFiniteGradientError as error:
        after = [slot.tensor.detach() for slot in (*optimizer.slots, *optimizer.state_slots())]
        return str(error), optimizer.updates == 0 and all(map(torch.equal, state, after))
    return "the step was taken", False


@pytest.mark.parametrize(
    ("layout", "faulty"),
    [({"pp": 2, "dp": 2, "ep": 2}, 3), ({"tp": 2, "ep": 2, "sequence_parallel": True}, 1)],
    ids=["PP2-DP2-EP2", "TP2-EP2"],
)
def test_every_rank_stops_and_names_the_factor(layout: dict, faulty: int, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config_of(layers=4, mla=(2,), num_attention_heads=4, kda_heads=4))
    parallel = ParallelRecipe(**layout)
    outcomes = run_ranks(parallel.world_size, poisoned_step, model, parallel, faulty)
    for text, untouched in outcomes:
        assert text == (
            f"the gradient of {FAULTY} and 0 more is not finite: the step was not taken, adapter and optimizer are "
            "unchanged"
        )
        assert untouched
