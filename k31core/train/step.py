"""One optimizer step over a whole rollout.

    microbatches -> decoder -> hidden -> log-probs of labels and candidates (in chunks) -> loss / N -> backward
                 -> sum over ranks -> norm -> checks -> clip -> AdamW

N is the number of loss tokens of the whole step. How the microbatches run is a `Schedule`: one after the other here,
a pipeline elsewhere; everything else is the same under any mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k31core.model.decoder import Decoder, Packed
from k31core.ops.logprobs import label_and_candidate_logprobs
from k31core.parallel.mesh import SINGLE, Mesh
from k31core.rl.loss_records import LossInputs, LossOutputs
from k31core.rl.losses import LossChoice, policy_loss
from k31core.train.adamw import AdapterOptimizer
from k31core.train.batch import Microbatch, own_chunk
from k31core.train.gradients import GradientSums, clip_gradients, global_norm, prove_first_gradients

HeadLoss = Callable[[Tensor, Microbatch], LossOutputs]
"""(hidden `[T, D]` of this CP rank's tokens, its chunk of the microbatch) -> loss, on the last pipeline stage."""
Schedule = Callable[[Decoder, Sequence[Microbatch], HeadLoss], list[LossOutputs]]
"""Runs forward and backward of every microbatch (whole ones, not chunks); returns what the last stage computed."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Numbers of a step that come from the recipe."""

    choice: LossChoice
    temperature: float
    """The rollout's: log-probs are compared at it."""
    logprob_chunk_tokens: int
    clip_grad: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports."""

    metrics: dict[str, float]
    proof: str | None
    """What the first step proved about the gradients."""


def optimizer_step(
    decoder: Decoder,
    optimizer: AdapterOptimizer,
    batches: Sequence[Microbatch],
    settings: StepSettings,
    *,
    normaliser: int,
    lr: float,
    schedule: Schedule | None = None,
    prove: bool = False,
) -> StepResult:
    """Take one step; on any error adapter and optimizer are unchanged.

    normaliser: loss tokens of the whole step, over all ranks. prove: check the first step's gradients (skipped when no
    sample has an advantage, since then every gradient is zero by right).
    """
    mesh = decoder.build.mesh
    slots = optimizer.slots
    head_loss = _head_loss(decoder, settings, normaliser)
    with GradientSums(slots) as sums:
        outputs = (schedule or run_in_order)(decoder, batches, head_loss)
        gradients = sums.collect(mesh)
    norm = global_norm(slots, gradients, mesh)
    metrics = _metrics(outputs, mesh, normaliser)
    something_to_learn = metrics.pop("train/advantage_abs") > 0
    proof = prove_first_gradients(slots, gradients, mesh) if prove and something_to_learn else None
    clip_gradients(gradients, norm, settings.clip_grad)
    optimizer.apply(gradients, lr=lr)
    metrics |= {
        "train/grad_norm": norm,
        "train/lr": lr,
        "train/loss_tokens": float(normaliser),
        "train/microbatches": float(len(batches)),
    }
    return StepResult(metrics, proof)


def run_in_order(decoder: Decoder, batches: Sequence[Microbatch], head_loss: HeadLoss) -> list[LossOutputs]:
    """Forward and backward of one microbatch after the other; one pipeline stage."""
    outputs = []
    for batch in batches:
        chunk = own_chunk(batch, decoder.build.mesh).to(decoder.build.device)
        hidden = decoder(packed_input(chunk))
        output = head_loss(hidden, chunk)
        output.loss.backward()
        outputs.append(output)
    return outputs


def packed_input(chunk: Microbatch) -> Packed:
    """What the decoder reads of a microbatch."""
    return Packed(chunk.tokens, chunk.cu_seqlens, chunk.routing, chunk.selection)


def head_logprobs(
    decoder: Decoder,
    hidden: Tensor,
    labels: Tensor,
    candidates: Tensor | None,
    *,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `labels [N]` and `candidates [N, K]` from `hidden [N, D]`, whatever the vocabulary's split is."""
    mesh, head = decoder.build.mesh, decoder.lm_head
    return label_and_candidate_logprobs(
        hidden,
        head.weight,
        labels,
        candidates,
        temperature=temperature,
        vocab_start=head.shards["weight"].start,
        valid_vocab=decoder.config.vocab_size,
        group=mesh.tp.group,
        chunk=chunk,
        # The decoder hands out `hidden` inside a tensor-parallel region, whose entrance sums the gradient already.
        reduce_grad=mesh.tp.size == 1,
    )


def _head_loss(decoder: Decoder, settings: StepSettings, normaliser: int) -> HeadLoss:
    def head_loss(hidden: Tensor, chunk: Microbatch) -> LossOutputs:
        candidates = chunk.candidate_ids if settings.choice.needs_candidates else None
        label, candidate = head_logprobs(
            decoder,
            hidden.index_select(0, chunk.rows),
            chunk.labels,
            candidates,
            temperature=settings.temperature,
            chunk=settings.logprob_chunk_tokens,
        )
        inputs = LossInputs(
            logprobs=label,
            candidate_logprobs=candidate,
            sampler_logprobs=chunk.sampler_logprobs,
            sampler_candidate_logprobs=chunk.candidate_logprobs,
            candidate_ids=candidates,
            label_ids=chunk.labels,
            advantages=chunk.advantages,
            mask=chunk.mask,
            origin=chunk.origin,
        )
        output = policy_loss(inputs, settings.choice, normaliser=normaliser)
        size = torch.where(chunk.mask, chunk.advantages.abs(), 0.0).double().sum()
        output.sums["train/advantage_abs"] = size
        return output

    return head_loss


def _metrics(outputs: Sequence[LossOutputs], mesh: Mesh, normaliser: int) -> dict[str, float]:
    """Means over the step's loss tokens (and peaks), the same on every rank."""
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for output in outputs:
        sums["train/loss"] = sums.get("train/loss", 0.0) + float(output.loss.detach()) * normaliser
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        for name, value in output.peaks.items():
            peaks[name] = max(peaks.get(name, 0.0), float(value))
    if mesh != SINGLE:
        sums, peaks = _agree(sums, peaks, mesh)
    return {name: value / normaliser for name, value in sums.items()} | peaks


def _agree(sums: dict[str, float], peaks: dict[str, float], mesh: Mesh) -> tuple[dict[str, float], dict[str, float]]:
    """Sum and maximum over the ranks that saw other tokens; stages that saw no loss learn it from the last one."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    if mesh.last_stage and mesh.data.size > 1:
        for values, op in ((sums, dist.ReduceOp.SUM), (peaks, dist.ReduceOp.MAX)):
            packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
            dist.all_reduce(packed, op=op, group=mesh.data.group)
            values.update(zip(values, packed.tolist()))
    if mesh.pp.size > 1:
        known: list[object] = [(sums, peaks) if mesh.last_stage else None]
        source = dist.get_global_rank(mesh.pp.group, mesh.pp.size - 1)
        dist.broadcast_object_list(known, src=source, group=mesh.pp.group, device=device)
        sums, peaks = known[0]  # type: ignore[misc]
    return sums, peaks
