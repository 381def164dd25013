"""Kimi delta attention on packed sequences: gate, chunked form, decoding step."""

from k31core.ops.kda.chunk import kda_chunk
from k31core.ops.kda.reference import kda_gate, kda_recurrent, kda_step, l2norm

__all__ = ["kda_chunk", "kda_gate", "kda_recurrent", "kda_step", "l2norm"]
