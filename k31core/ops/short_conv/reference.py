"""Causal depthwise convolution followed by SiLU, in plain torch: the definition, and the CPU path.

Legend: T packed tokens, n sequences, C channels, K taps (4 in the K3 family), B decoding rows. `weight[:, 0, K - 1]`
meets the current token, `weight[:, 0, 0]` the oldest one. A state is the last K - 1 inputs of a sequence, oldest
first, `[.., C, K - 1]`. Taps are added oldest first, elementwise, so a token's result has the same bits in any batch
and in prefill and decoding alike.
"""

import torch

from k31core.ops.rowstable import accumulate_dtype, silu


def token_positions(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence, position in the sequence) of every packed token, both int64 `[T]`. cu_seqlens: int `[n + 1]` from 0
    to T."""
    starts = cu_seqlens.to(torch.int64)
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts, token, right=True) - 1
    return sequence, token - starts[sequence]


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, initial_state: torch.Tensor | None = None
) -> torch.Tensor:
    """SiLU(conv(x)) `[T, C]` in the dtype of x; every packed sequence starts from zeros, or from `initial_state [n,
    C, K - 1]`.

    x: `[T, C]`. weight: `[C, 1, K]`. Computed in fp32 (fp64 for fp64 input).
    """
    tokens, channels = x.shape
    taps = weight.shape[-1]
    dtype = accumulate_dtype(x)
    sequence, position = token_positions(cu_seqlens, tokens)
    rows, filters = x.to(dtype), weight.to(dtype)[:, 0]
    total = torch.zeros(tokens, channels, dtype=dtype, device=x.device)
    for back in range(taps - 1, -1, -1):
        shifted = torch.cat([rows.new_zeros(min(back, tokens), channels), rows[: max(tokens - back, 0)]])
        inside = (position >= back)[:, None]
        if initial_state is None:
            before = torch.zeros((), dtype=dtype, device=x.device)
        # input number `position - back` of the sequence, counted from its start: -1 is the newest entry of the state
        else:
            before = initial_state.to(dtype)[sequence, :, (taps - 1 + position - back).clamp(max=taps - 2)]
        total = total + torch.where(inside, shifted, before) * filters[:, taps - 1 - back]
    return silu(total).to(x.dtype)


def causal_conv_state(
    x: torch.Tensor, cu_seqlens: torch.Tensor, taps: int, initial_state: torch.Tensor | None = None
) -> torch.Tensor:
    """The state `[n, C, taps - 1]` left by each packed sequence of x `[T, C]`, in the dtype of x; zeros before its
    start.

    `initial_state [n, C, taps - 1]`: what the sequences had seen before x (a prefill in pieces).
    """
    starts, ends = cu_seqlens[:-1].to(torch.int64), cu_seqlens[1:].to(torch.int64)
    columns = []
    for back in range(taps - 1, 0, -1):
        index = ends - back
        newest = x[index.clamp(min=0)]
        if initial_state is None:
            before = torch.zeros((), dtype=x.dtype, device=x.device)
        else:
            column = (taps - 1 + index - starts).clamp(max=taps - 2)
            before = initial_state.to(x.dtype)[torch.arange(len(starts), device=x.device), :, column]
        columns.append(torch.where((index >= starts)[:, None], newest, before))
    return torch.stack(columns, dim=-1)


def causal_conv_step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row: (SiLU(conv) `[B, C]`, new state `[B, C, K - 1]`). x: `[B, C]`, state: `[B, C, K - 1]`."""
    dtype = accumulate_dtype(x)
    taps = weight.shape[-1]
    filters = weight.to(dtype)[:, 0]
    total = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for tap in range(taps - 1):
        total = total + state[:, :, tap].to(dtype) * filters[:, tap]
    total = total + x.to(dtype) * filters[:, taps - 1]
    return silu(total).to(x.dtype), torch.cat([state[:, :, 1:], x[:, :, None].to(state.dtype)], dim=-1)
