"""How evenly contiguous CP chunks divide the work of DSA: `python tests/bench/cp_balance.py [--cp 2] [--long N]`.

Counts, no timing. Of all that a layer does only the selection and the attention over it stay with the rank that has the
query; everything else is the same on every rank (projections and experts: equal tokens; KDA and dense attention: equal
heads of whole sequences). Samples as the recipes make them (a prompt, an answer of up to 3,072 tokens, a third cut at
the limit), packed by the trainer's own plan; or, with `--long`, one sequence of N tokens a CP rank.
"""

import argparse

import numpy as np

from k31core.model.sizes import KIMI_K31
from k31core.train.batch import pack_plan
from k31core.train.flops import forward_flops

TOPK, INDEX_HEADS, INDEX_WIDTH, HEADS = 2048, 32, 128, 24
"""K3.1; attention heads of one TP rank of four. The indexer is replicated over TP."""
ATTENTION = HEADS * (576 + 512)
SCORES = INDEX_HEADS * INDEX_WIDTH
"""Multiply-adds a key: the absorbed form of the attention, and the index scores."""


def work(lengths: np.ndarray) -> np.ndarray:
    """Multiply-adds of every packed token: scores where some keys are left out, attention over what is selected."""
    keys = np.concatenate([np.arange(1, n + 1) for n in lengths])
    scored = np.where(keys > TOPK, keys, 0)
    return scored * SCORES + np.minimum(keys, TOPK) * ATTENTION


def share(total: np.ndarray, cp: int, zigzag: bool) -> float:
    """The busiest rank's work, as a multiple of the mean."""
    padded = np.pad(total, (0, -len(total) % (2 * cp)))
    parts = padded.reshape(2 * cp, -1).sum(1) if zigzag else padded.reshape(cp, -1).sum(1)
    ranks = parts[:cp] + parts[::-1][:cp] if zigzag else parts
    return float(ranks.max() / max(1.0, ranks.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tokens-per-gpu", type=int, default=8192)
    parser.add_argument("--long", type=int, default=0)
    arguments = parser.parse_args()
    rng, cp = np.random.default_rng(0), arguments.cp
    capacity = arguments.tokens_per_gpu * cp
    lengths = rng.integers(80, 400, 512) + np.minimum(3072, rng.lognormal(7.6, 0.7, 512)).astype(int)
    packs = [lengths[members] for members in pack_plan(lengths.tolist(), capacity)]
    if arguments.long:
        packs = [np.array([arguments.long * cp])]
    for name, zigzag in (("contiguous", False), ("zig-zag", True)):
        totals = [work(pack) for pack in packs]
        weight = np.array([total.sum() for total in totals], dtype=float)
        shares = np.array([share(total, cp, zigzag) for total in totals])
        mean = float((shares * weight).sum() / weight.sum())
        print(f"{name}: busiest rank {mean:.3f} x the mean, worst microbatch {shares.max():.3f} ({len(packs)} of them)")
    mine = 2.0 * sum(float(work(pack).sum()) for pack in packs) * len(KIMI_K31.mla_layers)
    whole = forward_flops(KIMI_K31, np.concatenate(packs).tolist()) * HEADS / KIMI_K31.num_attention_heads
    print(f"this work is {mine / whole:.1%} of a TP rank's forward operations")


if __name__ == "__main__":
    main()
