"""By hand: does RL learn? The tiny recipe's loop of engine, rewards and trainer, without flow, services or processes.

    python tests/bench/learn_tiny.py MODEL_DIR --seeds 0 1 2 [--shuffled] [--steps 40] [--set train.optimizer.lr=1e-3]

MODEL_DIR is a tiny checkpoint (`k31core.convert.tiny`). Prints one line a step and, for each seed, the mean sampled
reward of the first and last five steps and the held-out accuracy (sampled and greedy) before and after.
"""

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from k31core.convert.tiny_data import Sum, arithmetic_problems, split_problems
from k31core.convert.tiny_tokenizer import EOS, VOCABULARY, prompt_tokens
from k31core.recipe.load import load_recipe, resolve
from k31core.rl.advantages import group_advantages, shuffled_advantages
from k31core.rl.types import Completion, GenerateRequest, SamplingParams
from k31core.rollout.factory import build_engine
from k31core.train.samples import TrainSample
from k31core.train.trainer import build_trainer


def text_of(completion: Completion) -> str:
    """The answer without its end token."""
    return "".join(VOCABULARY[t] for t in completion.tokens.tolist() if t != EOS)


def reward_of(problem: Sum, completion: Completion) -> float:
    """1 for the right sum in the box after the last `</think>`."""
    return float(text_of(completion).rpartition("</think>")[2] == f"\\boxed{{{problem.label}}}")


def request(problem: Sum, name: str, version: int, recipe, *, temperature: float = 1.0, record: bool = True):
    """A request with its own seed, from its name alone."""
    seed = int.from_bytes(hashlib.sha256(f"{recipe.seed}/{name}".encode()).digest()[:6], "big")
    params = SamplingParams(
        temperature=temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
        max_new_tokens=recipe.rollout.max_response_tokens,
        stop_token_ids=(EOS,),
        seed=seed,
        top_logprobs_num=recipe.rollout.top_logprobs_num if record else 0,
        return_routing=record,
    )
    return GenerateRequest(name, tuple(prompt_tokens(problem.question)), params, version)


async def accuracy(engine, problems, version, recipe, tag, *, temperature, samples):
    """Mean reward over held-out problems."""
    asked = [(p, f"{tag}-{i}-{j}") for i, p in enumerate(problems) for j in range(samples)]
    answers = await asyncio.gather(
        *(engine.generate(request(p, n, version, recipe, temperature=temperature, record=False)) for p, n in asked)
    )
    return statistics.fmean(reward_of(p, a) for (p, _), a in zip(asked, answers))


async def run(model_dir: Path, recipe, parts, *, shuffled: bool, steps: int, quiet: bool) -> dict:
    """One seed: returns the curve and the held-out accuracies."""
    torch.set_num_threads(recipe.train.threads)
    trainer, _ = build_trainer(recipe, model_dir)
    trainer.fresh()
    engine = await build_engine(resolve(recipe), model_dir)
    curve, careful, seconds = [], [], []
    with tempfile.TemporaryDirectory() as scratch:

        async def publish(version: int) -> None:
            directory = Path(scratch) / f"v{version}"
            directory.mkdir()
            trainer.export(directory, optimizer=False)
            await engine.load_adapter(directory, version)

        async def heldout(version: int) -> dict[str, float]:
            return {
                "sampled": await accuracy(
                    engine, parts["heldout"], version, recipe, f"s{version}", temperature=1.0, samples=8
                ),
                "greedy": await accuracy(
                    engine, parts["heldout"], version, recipe, f"g{version}", temperature=0.0, samples=1
                ),
            }

        await publish(0)
        before = await heldout(0)
        order: list[Sum] = []
        for step in range(steps):
            begun = time.perf_counter()
            if len(order) < recipe.rollout.prompts_per_step:
                epoch = list(parts["train"])
                random.Random(recipe.seed * 1000 + step).shuffle(epoch)
                order += epoch
            problems, order = order[: recipe.rollout.prompts_per_step], order[recipe.rollout.prompts_per_step :]
            names = [f"{step}-{g}-{i}" for g in range(len(problems)) for i in range(recipe.rollout.samples_per_prompt)]
            each = [problems[int(n.split("-")[1])] for n in names]
            answers = await asyncio.gather(*(engine.generate(request(p, n, step, recipe)) for p, n in zip(each, names)))
            rollout_s = time.perf_counter() - begun
            rewards = [reward_of(p, a) for p, a in zip(each, answers)]
            size = recipe.rollout.samples_per_prompt
            advantages = np.concatenate(
                [group_advantages(rewards[i : i + size], f"group {i // size}") for i in range(0, len(rewards), size)]
            )
            if shuffled:
                advantages = np.concatenate(
                    [
                        shuffled_advantages(advantages[i : i + size], recipe.seed, step, i)
                        for i in range(0, len(rewards), size)
                    ]
                )
            samples = [
                TrainSample(
                    sample_id=name,
                    prompt=np.array(prompt_tokens(problem.question), np.int32),
                    response=answer.tokens,
                    logprobs=answer.logprobs,
                    top_ids=answer.top_ids,
                    top_logprobs=answer.top_logprobs,
                    routing=answer.routing,
                    advantage=float(advantage),
                )
                for name, problem, answer, advantage in zip(names, each, answers, advantages)
            ]
            train_begun = time.perf_counter()
            result = trainer.train(samples)
            train_s = time.perf_counter() - train_begun
            await publish(step + 1)
            curve.append(statistics.fmean(rewards))
            careful.append(statistics.fmean(not text_of(a).startswith("<think></think>") for a in answers))
            seconds.append(time.perf_counter() - begun)
            m = result.metrics
            if not quiet:
                print(
                    f"step {step:2d} reward {curve[-1]:.3f} careful {careful[-1]:.2f} grad {m['train/grad_norm']:.3f} "
                    f"diff {m['train/train_rollout_logprob_abs_diff']:.1e} kl {m['train/train_rollout_kl']:.1e} "
                    f"rho {m['train/sc_tail_ratio']:.3f} rollout {rollout_s:.2f}s train {train_s:.2f}s",
                    flush=True,
                )
        after = await heldout(steps)
    await engine.close()
    return {
        "seed": recipe.seed,
        "shuffled": shuffled,
        "first5": round(statistics.fmean(curve[:5]), 3),
        "last5": round(statistics.fmean(curve[-5:]), 3),
        "heldout_sampled": [round(before["sampled"], 3), round(after["sampled"], 3)],
        "heldout_greedy": [round(before["greedy"], 3), round(after["greedy"], 3)],
        "careful": [round(statistics.fmean(careful[:5]), 3), round(statistics.fmean(careful[-5:]), 3)],
        "mean_step_s": round(statistics.fmean(seconds), 2),
        "curve": [round(value, 3) for value in curve],
    }


def main() -> None:
    """Parse arguments and run the seeds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shuffled", action="store_true", help="control: advantages shuffled within groups")
    parser.add_argument("--set", action="append", default=[], help="recipe override")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    made = json.loads((args.model_dir / "tiny.json").read_text())["config"]
    parts = split_problems(arithmetic_problems(made["max_operand"], made["seed"]), made["heldout_one_in"])
    print(f"{len(parts['train'])} training and {len(parts['heldout'])} held-out problems")
    for seed in args.seeds:
        recipe = load_recipe("tiny", ["train.backend=plain", f"seed={seed}", *args.set])
        result = asyncio.run(
            run(args.model_dir, recipe, parts, shuffled=args.shuffled, steps=args.steps, quiet=args.quiet)
        )
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
