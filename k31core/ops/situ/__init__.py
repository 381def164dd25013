"""SiTU-GLU: the activation of every feed-forward layer of the K3 family."""

from k31core.ops.situ.reference import situ_glu

__all__ = ["situ_glu"]
