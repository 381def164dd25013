"""AttnRes: mix the residual snapshot bank with the running sum."""

from k31core.ops.attn_res.reference import attn_res_mix

__all__ = ["attn_res_mix"]
