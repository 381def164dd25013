"""First values of a decoder that is trained from nothing (the tiny checkpoint); published models are never
initialised."""

import torch
from torch import Tensor

from k31core.model.decoder import Decoder


@torch.no_grad()
def init_base(decoder: Decoder, seed: int) -> None:
    """Fill every base tensor of a whole decoder, deterministically in the order of its names.

    Matrices are normal with std width_in ** -0.5 (embeddings 1), so activations keep unit scale; norms are ones;
    AttnRes scores start equal; the decay starts near exp(-0.1) a token, so that the KDA state remembers.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(decoder.named_parameters()):
        parameter.copy_(_first_value(name, parameter, generator))


def _first_value(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    module, _, leaf = name.rpartition(".")
    if leaf == "dt_bias":
        return torch.full_like(parameter, -4.0)
    if leaf == "A_log" or leaf == "bias" or "res_proj" in module:
        return torch.zeros_like(parameter)
    if "norm" in module.rpartition(".")[2]:
        return torch.ones_like(parameter)
    std = 1.0 if module.endswith("embed_tokens") else parameter.shape[-1] ** -0.5
    drawn = torch.randn(parameter.shape, generator=generator) * std
    return drawn.to(parameter.dtype).to(parameter.device)
