"""Causal depthwise convolution with SiLU on packed sequences, and its decoding step."""

from k31core.ops.short_conv.reference import causal_conv, causal_conv_state, causal_conv_step

__all__ = ["causal_conv", "causal_conv_state", "causal_conv_step"]
