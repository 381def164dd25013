"""The caches of running requests: recurrent and convolution states by row, latent and index keys by page.

Legend: Lk KDA layers, Lm MLA layers, rows of the running batch, H heads, d KDA head width, C = 3 H d convolution
channels, W = kv_lora + rope cached width, di index width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from k31core.model.config import ModelConfig
from k31core.rollout.engines.embedded.attention import BLOCK


@dataclass(slots=True)
class PromptState:
    """What a prompt leaves behind: everything needed to continue it, as often as wanted."""

    conv: Tensor
    """`[Lk, C, kernel - 1]`: the last inputs of q, k and v's convolutions."""
    state: Tensor
    """`[Lk, H, d, d]` fp32: the delta-rule state."""
    latent: Tensor
    """`[Lm, b, BLOCK, W]`, zeros past the prompt."""
    index_keys: Tensor
    """`[Lm, b, BLOCK, di]`; di is 0 without an indexer."""

    @staticmethod
    def empty(config: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> "PromptState":
        """The state before the first token of a prompt of `tokens` tokens."""
        shapes = _Shapes.of(config)
        blocks = page_count(tokens)
        at = {"dtype": dtype, "device": device}
        return PromptState(
            conv=torch.zeros(shapes.kda_layers, *shapes.conv, **at),
            state=torch.zeros(shapes.kda_layers, *shapes.state, dtype=torch.float32, device=device),
            latent=torch.zeros(shapes.mla_layers, blocks, BLOCK, shapes.latent, **at),
            index_keys=torch.zeros(shapes.mla_layers, blocks, BLOCK, shapes.index, **at),
        )


class Caches:
    """Rows `0 .. n - 1` are the running batch, kept without holes; page 0 belongs to padding rows."""

    def __init__(self, config: ModelConfig, rows: int, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shapes = _Shapes.of(config)
        at = {"dtype": dtype, "device": device}
        self.conv = torch.zeros(shapes.kda_layers, rows, *shapes.conv, **at)
        self.state = torch.zeros(shapes.kda_layers, rows, *shapes.state, dtype=torch.float32, device=device)
        self.latent = torch.zeros(shapes.mla_layers, pages + 1, BLOCK, shapes.latent, **at)
        self.index_keys = torch.zeros(shapes.mla_layers, pages + 1, BLOCK, shapes.index, **at)

    def place(self, prompt: PromptState, rows: list[int], pages: list[list[int]]) -> None:
        """Continue `prompt` in each of `rows`, whose caches lie in `pages`; pages past the prompt are cleared."""
        used = prompt.latent.shape[1]
        first = torch.tensor([own[:used] for own in pages], device=self.latent.device)
        rest = torch.tensor(
            [page for own in pages for page in own[used:]], dtype=torch.int64, device=self.latent.device
        )
        self.conv[:, rows] = prompt.conv[:, None]
        self.state[:, rows] = prompt.state[:, None]
        for cache, values in ((self.latent, prompt.latent), (self.index_keys, prompt.index_keys)):
            cache[:, first] = values[:, None]
            # a slot no token has written must stay finite: its weight is zero, and zero times NaN is NaN
            cache[:, rest] = 0

    def move_rows(self, moves: list[tuple[int, int]]) -> None:
        """Copy row states for each (from, to); the sources lie behind all destinations."""
        source, target = [a for a, _ in moves], [b for _, b in moves]
        self.conv[:, target] = self.conv[:, source]
        self.state[:, target] = self.state[:, source]

    @property
    def bytes(self) -> int:
        """Memory of all caches."""
        return sum(t.numel() * t.element_size() for t in (self.conv, self.state, self.latent, self.index_keys))


def page_count(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // BLOCK)


@dataclass(frozen=True, slots=True)
class _Shapes:
    kda_layers: int
    mla_layers: int
    conv: tuple[int, int]
    state: tuple[int, int, int]
    latent: int
    index: int

    @staticmethod
    def of(config: ModelConfig) -> "_Shapes":
        heads, width = config.kda_num_heads, config.kda_head_dim
        return _Shapes(
            kda_layers=config.num_hidden_layers - len(config.mla_layers),
            mla_layers=len(config.mla_layers),
            conv=(3 * heads * width, config.short_conv_kernel_size - 1),
            state=(heads, width, width),
            latent=config.kv_lora_rank + config.qk_rope_head_dim,
            index=0 if config.dsa is None else config.dsa.head_dim,
        )
