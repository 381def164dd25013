"""MXFP4: two E2M1 codes a byte and one E8M0 scale for 32 consecutive inputs, decoded and encoded exactly."""

from k31core.ops.mxfp4.reference import BLOCK, MxFp4Error, check_scale, decode, encode, scale_of_byte

__all__ = ["BLOCK", "MxFp4Error", "check_scale", "decode", "encode", "scale_of_byte"]
