"""KDA on a GPU through fla-core's chunked kernels (checked with 0.6.0), behind our operator's layout and conventions.

What fla calls by other names: `safe_gate` promises log decays of at least -5 a token, which lets its intra-chunk
products run on the tensor cores; the K3 family's gate keeps that promise by its bound. `scale` is left at its
default K ** -0.5.
"""

import functools

import torch


@functools.cache
def why_unavailable() -> str | None:
    """None when fla's KDA imports, else the reason."""
    try:
        from fla.ops.kda import chunk_kda  # noqa: F401
    except ImportError as error:
        return f"fla-core cannot be imported ({error}); install the gpu extra"
    return None


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    bounded_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `k31core.ops.kda.kda_chunk`."""
    from fla.ops.kda import chunk_kda

    o, state = chunk_kda(
        q[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
        safe_gate=bounded_gate,
        cu_seqlens=cu_seqlens.to(torch.int64),
    )
    return o.squeeze(0), state  # a view, also backward; o[0] would copy its whole gradient


def kda_gated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta_logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `k31core.ops.kda.kda_gated`: the norms, the gate and the sigmoid run inside fla's kernels."""
    from fla.ops.kda import chunk_kda

    o, state = chunk_kda(
        q[None],
        k[None],
        v[None],
        f[None],
        beta_logits[None],
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens.to(torch.int64),
        A_log=A_log,
        dt_bias=dt_bias,
    )
    return o.squeeze(0), state
