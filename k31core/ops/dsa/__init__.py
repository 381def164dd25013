"""DSA: index scores, deterministic selection of the best keys, and attention over them."""

from k31core.ops.dsa.attention import mla_latent_attention, sparse_mla_attention
from k31core.ops.dsa.reference import causal_ranges, index_scores, index_scores_step, select_keys, select_topk

__all__ = [
    "causal_ranges",
    "index_scores",
    "index_scores_step",
    "mla_latent_attention",
    "select_keys",
    "select_topk",
    "sparse_mla_attention",
]
