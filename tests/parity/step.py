"""One optimizer step on a rank of a layout, and its comparison with one process.

What is compared: loss and metrics, every adapter gradient (summed, before clipping takes effect) and every factor after
one AdamW step. The step is the trainer's own (`k31core.train.step`), from the checkpoint files on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k31core.checkpoint.adapter import load_adapter
from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.lora import trainable_slots
from k31core.model.weight_names import adapter_slots, base_slots
from k31core.parallel.groups import build_mesh
from k31core.parallel.mesh import SINGLE, stage_layers
from k31core.parallel.sharding import Shard
from k31core.recipe.train import ParallelRecipe
from k31core.rl.losses import LossChoice
from k31core.rl.selection import SelectedKeys, from_positions
from k31core.train.adamw import AdamSettings, AdamW
from k31core.train.batch import loss_token_count, make_microbatches
from k31core.train.pipeline import run_pipelined
from k31core.train.samples import SampleLimits, TrainSample
from k31core.train.step import StepSettings, optimizer_step, run_in_order

RANK, ALPHA, CANDIDATES = 3, 6.0, 4


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is packed."""

    model: Path
    adapter: Path
    samples: tuple[TrainSample, ...]
    tokens_per_gpu: int = 64
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    tie_gate_up: bool = False
    replay: bool = True
    replay_keys: bool = False
    """Replay the (random) DSA selection of the samples too."""
    cuda: bool = False
    """One GPU a rank."""


@dataclass(frozen=True)
class Outcome:
    """What one rank has after the step."""

    metrics: dict[str, float]
    parts: list[tuple[str, Shard, np.ndarray, np.ndarray]]
    """(name, shard, gradient, factor after the step) of every trained factor of this rank. Arrays, since reading a
    pickled tensor of these processes would import megatron-core."""


class _Recording(AdamW):
    def apply(self, gradients: Sequence[torch.Tensor], *, lr: float) -> None:
        self.seen = [g.clone() for g in gradients]
        super().apply(gradients, lr=lr)


def take_step(rank: int, world: int, case: Case, layout: ParallelRecipe) -> Outcome:
    """Build this rank's part, load only its bytes, take one step."""
    mesh = build_mesh(layout) if world > 1 else SINGLE
    config = load_config(case.model)
    stages = stage_layers(config.num_hidden_layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)
    lora = LoraSpec(RANK, ALPHA, tie_gate_up=case.tie_gate_up)
    device = torch.device("cuda", rank) if case.cuda else torch.device("cpu")
    build = Build(mesh=mesh, dtype=case.dtype, device=device, lora=lora, recompute=case.recompute)
    decoder = Decoder(config, build, stages[mesh.pp.rank])
    NativeCheckpoint(case.model).load(base_slots(decoder), progress=False)
    load_adapter(case.adapter, adapter_slots(decoder), partial=layout.pp > 1)
    # A large eps keeps the first update a smooth function of the gradient: with 1e-8 it is the gradient's sign, and
    # for an entry that is zero but for rounding, chance.
    optimizer = _Recording(trainable_slots(decoder), AdamSettings(0.9, 0.98, 1e-3, 0.1))
    bound = limits_of(config, replay=case.replay, replay_keys=case.replay_keys)
    result = optimizer_step(
        decoder,
        optimizer,
        make_microbatches(case.samples, bound, mesh=mesh, tokens_per_gpu=case.tokens_per_gpu),
        StepSettings(LossChoice("score_centering"), temperature=1.0, logprob_chunk_tokens=16, clip_grad=1e9),
        normaliser=loss_token_count(case.samples),
        lr=0.01,
        schedule=run_pipelined if mesh.pp.size > 1 else run_in_order,
    )
    parts = [
        (slot.name, slot.shard, _array(gradient), _array(slot.tensor))
        for slot, gradient in zip(optimizer.slots, optimizer.seen, strict=True)
    ]
    return Outcome(result.metrics, parts)


def _array(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


def limits_of(config: Any, *, replay: bool = True, replay_keys: bool = False) -> SampleLimits:
    """What samples of this model must satisfy."""
    return SampleLimits(
        vocab_size=config.vocab_size,
        max_tokens=1 << 20,
        candidates=CANDIDATES,
        moe_layers=tuple(i for i in range(config.num_hidden_layers) if config.is_moe(i)),
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_token,
        replay_routing=replay,
        replay_selection=replay_keys,
        index_layers=0 if config.dsa is None else len(config.mla_layers),
        index_topk=0 if config.dsa is None else config.dsa.topk,
    )


def random_samples(config: Any, lengths: Sequence[tuple[int, int]], seed: int = 0) -> tuple[TrainSample, ...]:
    """Samples of (prompt, response) tokens with random routing, candidates and advantages; the last one is masked."""
    rng = np.random.default_rng(seed)
    out = []
    for number, (prompt, response) in enumerate(lengths):
        logq = np.log(rng.dirichlet(np.full(config.vocab_size, 0.3), response) + 1e-9).astype(np.float32)
        order = np.argsort(-logq, axis=1)[:, :CANDIDATES].astype(np.int32)
        chosen = order[np.arange(response), rng.integers(0, CANDIDATES, response)]
        shape = (prompt + response - 1, config.num_hidden_layers)
        routing = rng.random((*shape, config.num_experts)).argsort(-1)[..., : config.num_experts_per_token]
        out.append(
            TrainSample(
                sample_id=f"0-{number}-0",
                prompt=rng.integers(0, config.vocab_size, prompt).astype(np.int32),
                response=chosen.astype(np.int32),
                logprobs=np.take_along_axis(logq, chosen[:, None], 1)[:, 0],
                top_ids=order,
                top_logprobs=np.take_along_axis(logq, order, 1),
                routing=routing.astype(np.int16),
                advantage=float(rng.normal()),
                selection=_random_keys(config, prompt + response - 1, number),
                masked=number == len(lengths) - 1,
            )
        )
    return tuple(out)


def _random_keys(config: Any, inputs: int, seed: int) -> SelectedKeys | None:
    """Any keys a token may attend, others in every layer; None without an indexer."""
    if config.dsa is None:
        return None
    rng, topk = np.random.default_rng(seed), config.dsa.topk
    positions = np.full((inputs, len(config.mla_layers), topk), -1)
    for row in range(inputs):
        for layer in range(len(config.mla_layers)):
            count = min(row + 1, topk)
            positions[row, layer, :count] = rng.permutation(row + 1)[:count]
    return from_positions(positions, topk)


def worst_differences(outcomes: list[Outcome], reference: Outcome) -> dict[str, float]:
    """Largest differences from one process: loss and norm (relative), gradients and factors (relative to the largest
    entry of the logical tensor). Raises when a logical factor is held by nobody or its gradient is zero."""
    full = {n: (torch.from_numpy(gradient), torch.from_numpy(factor)) for n, _, gradient, factor in reference.parts}
    seen: dict[str, int] = {}
    worst = {"loss": 0.0, "grad_norm": 0.0, "gradient": 0.0, "factor": 0.0}
    for outcome in outcomes:
        for key in ("loss", "grad_norm"):
            got, want = outcome.metrics[f"train/{key}"], reference.metrics[f"train/{key}"]
            worst[key] = max(worst[key], abs(got - want) / abs(want))
        for name, shard, gradient, factor in outcome.parts:
            want_gradient, want_factor = (shard.take(t) for t in full[name])
            for key, got, want, whole in (
                ("gradient", torch.from_numpy(gradient), want_gradient, full[name][0]),
                ("factor", torch.from_numpy(factor), want_factor, full[name][1]),
            ):
                assert got.shape == want.shape, (name, got.shape, want.shape)
                assert whole.abs().max() > 0, f"{name}: the {key} is zero, so nothing would be compared"
                worst[key] = max(worst[key], float((got - want).abs().max() / whole.abs().max()))
            seen[name] = seen.get(name, 0) + gradient.size
    missing = [name for name, (gradient, _) in full.items() if seen.get(name, 0) < gradient.numel()]
    assert not missing, f"{len(missing)} factors are not covered by the ranks, first {missing[0]}"
    return worst
