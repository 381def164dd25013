"""By hand: how fast is one optimizer step? Trainer alone, on random rollouts of a checkpoint's own vocabulary.

    python tests/bench/bench_train.py MODEL_DIR [--samples 128] [--prompt 10] [--response 16] [--set FIELD=VALUE]

Prints seconds a step (median of the timed steps), packed tokens a second, and the process's peak memory. The rollout is
random, so losses mean nothing; shapes, routing replay and candidates are those of a real one.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from k31core.model.config import ModelConfig
from k31core.recipe.load import load_recipe
from k31core.recipe.recipe import Recipe
from k31core.train.flops import train_flops
from k31core.train.samples import TrainSample
from k31core.train.trainer import build_trainer


def random_rollout(config: ModelConfig, recipe: Recipe, count: int, prompt: int, response: int) -> list[TrainSample]:
    """`count` samples; lengths vary by a quarter around the given ones."""
    rng = np.random.default_rng(0)
    samples = []
    for index in range(count):
        p, r = (max(1, round(n * rng.uniform(0.75, 1.25))) for n in (prompt, response))
        log_q = np.log(rng.dirichlet(np.ones(config.vocab_size), r)).astype(np.float32)
        order = np.argsort(-log_q, axis=1)[:, : recipe.rollout.top_logprobs_num].astype(np.int32)
        token = order[:, 0]
        routing = rng.random((p + r - 1, config.num_hidden_layers, config.num_experts)).argsort(-1)
        samples.append(
            TrainSample(
                sample_id=f"0-0-{index}",
                prompt=rng.integers(0, config.vocab_size, p).astype(np.int32),
                response=token,
                logprobs=np.take_along_axis(log_q, token[:, None], 1)[:, 0],
                top_ids=order,
                top_logprobs=np.take_along_axis(log_q, order, 1),
                routing=routing[..., : config.num_experts_per_token].astype(np.int16),
                advantage=float(rng.normal()),
            )
        )
    return samples


def main() -> None:
    """Parse arguments, warm up with two steps, time the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=10)
    parser.add_argument("--response", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="recipe override")
    args = parser.parse_args()
    recipe = load_recipe("tiny", args.set)
    torch.set_num_threads(recipe.train.threads)
    trainer, _ = build_trainer(recipe, args.model_dir)
    trainer.fresh()
    samples = random_rollout(trainer.decoder.config, recipe, args.samples, args.prompt, args.response)
    seconds = []
    for step in range(args.steps + 2):
        begun = time.perf_counter()
        result = trainer.train(samples)
        if trainer.decoder.build.device.type == "cuda":
            torch.cuda.synchronize()
        if step >= 2:
            seconds.append(time.perf_counter() - begun)
    tokens, median = sum(s.tokens for s in samples), statistics.median(seconds)
    print(
        json.dumps(
            {
                "samples": len(samples),
                "packed_tokens": tokens,
                "microbatches": result.metrics["train/microbatches"],
                "seconds_a_step": round(median, 3),
                "spread": [round(min(seconds), 3), round(max(seconds), 3)],
                "tokens_per_second": round(tokens / median),
                "tflops": train_flops(trainer.decoder.config, [s.tokens for s in samples]) / median / 1e12,
                "host_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        )
    )


if __name__ == "__main__":
    main()
