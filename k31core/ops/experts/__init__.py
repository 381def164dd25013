"""Routed experts on packed MXFP4 weights: `expert_mlp` and the records it takes."""

from k31core.ops.experts.dispatch import expert_mlp
from k31core.ops.experts.weights import DenseExperts, ExpertLora, Experts, ExpertShapeError, PackedExperts

__all__ = ["DenseExperts", "ExpertLora", "ExpertShapeError", "Experts", "PackedExperts", "expert_mlp"]
