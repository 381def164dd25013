"""The dense feed-forward: SiTU-GLU between gate/up and down. Layer 0's FFN, and the shared experts of the others."""

from torch import Tensor, nn

from k31core.model.build import Build, LoraSpec
from k31core.model.config import ModelConfig
from k31core.model.linears import Linear, Split
from k31core.ops.situ import situ_glu


class Mlp(nn.Module):
    """down(SiTU(gate x) * lin(up x)), columns divided over TP."""

    def __init__(self, config: ModelConfig, width: int, build: Build, lora: LoraSpec | None) -> None:
        super().__init__()
        hidden, what = config.hidden_size, "feed-forward width"
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.gate_proj = Linear(hidden, width, build, split=Split.COLUMN, lora=lora, what=what)
        self.up_proj = Linear(hidden, width, build, split=Split.COLUMN, lora=lora, what=what)
        self.down_proj = Linear(width, hidden, build, split=Split.ROW, lora=lora, what=what)
        if lora is not None and lora.tie_gate_up:
            self.up_proj.lora_A = self.gate_proj.lora_A

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` inside a tensor-parallel region -> this rank's part of the sum `[T, D]`."""
        h = situ_glu(self.gate_proj(x), self.up_proj(x), beta=self.beta, linear_beta=self.linear_beta)
        return self.down_proj(h)
