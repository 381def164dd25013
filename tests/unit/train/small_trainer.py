"""A trainer over the known-answer checkpoint, and rollouts drawn from its own distribution."""

from pathlib import Path

import numpy as np
import torch

from k31core.model.decoder import Packed
from k31core.recipe.load import load_recipe
from k31core.train.samples import TrainSample
from k31core.train.trainer import Trainer, build_trainer

CASES = Path(__file__).parents[2] / "cases" / "model"
MODEL = CASES / "tiny-k31"
OVERRIDES = (
    "train.lora.rank=4",
    "train.lora.alpha=8",
    "train.backend=plain",
    "train.max_tokens_per_gpu=256",
    "rollout.top_logprobs_num=8",
)


def small_trainer(*overrides: str) -> Trainer:
    """`tiny` recipe on the 7-layer checkpoint; the adapter is fresh."""
    torch.set_num_threads(1)
    trainer, _ = build_trainer(load_recipe("tiny", [*OVERRIDES, *overrides]), MODEL)
    trainer.fresh()
    return trainer


@torch.no_grad()
def rollout(trainer: Trainer, seed: int, count: int = 6, candidates: int = 8) -> list[TrainSample]:
    """Random sequences scored by the trainer's own model, slightly perturbed: what an engine might have recorded."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = int(rng.integers(2, 6)), int(rng.integers(3, 9))
        ids = rng.integers(0, 96, prompt + response)
        packed = Packed(torch.from_numpy(ids), torch.tensor([0, len(ids)]))
        hidden, routing = trainer.decoder.forward_captured(packed)
        noise = torch.from_numpy(rng.normal(size=(response, 96)).astype(np.float32)) * 0.2
        log_q = torch.log_softmax(trainer.decoder.logits(hidden)[prompt - 1 : -1] + noise, -1)
        top = log_q.sort(descending=True, stable=True)
        samples.append(
            TrainSample(
                sample_id=f"0-{i // 2}-{i % 2}",
                prompt=ids[:prompt].astype(np.int32),
                response=ids[prompt:].astype(np.int32),
                logprobs=log_q[range(response), ids[prompt:]].numpy(),
                top_ids=top.indices[:, :candidates].numpy().astype(np.int32),
                top_logprobs=top.values[:, :candidates].numpy(),
                routing=routing[:-1].numpy().astype(np.int16),
                advantage=float(rng.normal()),
            )
        )
    return samples
