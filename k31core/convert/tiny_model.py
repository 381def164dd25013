"""The tiny checkpoint's architecture: its `config.json` in the published layout, and first values of its weights."""

from typing import Any

import torch
from torch import Tensor

from k31core.convert.tiny_tokenizer import BOS, EOS, PAD, VOCABULARY
from k31core.model.decoder import Decoder

_ARCHITECTURES = {
    "kimi_k31": "KimiK31ForConditionalGeneration",
    "kimi_k3": "KimiK3ForConditionalGeneration",
}
INDEX_TOPK = 16
"""Below the typical length of problem and answer, so that sparse selection really drops keys."""


def tiny_config(*, family: str, hidden_size: int, num_hidden_layers: int) -> dict[str, Any]:
    """`config.json` of the tiny model: KDA, MLA (with DSA for K3.1), latent MoE with shared experts, AttnRes blocks."""
    full = sorted({*range(4, num_hidden_layers + 1, 4), num_hidden_layers})
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "vocab_size": len(VOCABULARY),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "latent_moe_use_norm": True,
        "attn_res_block_size": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "linear_attn_config": {
            "num_heads": hidden_size // 32,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "kda_layers": [i for i in range(1, num_hidden_layers + 1) if i not in full],
            "full_attn_layers": full,
        },
        "quantization_config": _quantization(),
    }
    if family == "kimi_k31":
        text["dsa_config"] = {
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": INDEX_TOPK,
            "dsa_layers": full,
        }
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def _quantization() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\..*",
            "re:.*routed_expert_.*",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "format": "mxfp4-pack-quantized",
            }
        },
    }


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """First values of every weight, from `seed` and the order of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        parameter.copy_(first_value(name, parameter.shape, decoder.config.num_hidden_layers, generator))


def first_value(name: str, shape: torch.Size, layers: int, generator: torch.Generator) -> Tensor:
    """First value fp32 of the parameter `name` in a model of `layers` layers, on the generator's device."""
    at = {"generator": generator, "device": generator.device}
    kind = name.rsplit(".", 2)[-2]
    if name.endswith("dt_bias"):
        # log decay = -5 sigmoid(x + bias): from about -0.01 (long memory) to -1.3 (short) a token
        return torch.rand(shape, **at) * 5 - 6
    if name.endswith(("A_log", "e_score_correction_bias")) or "res_proj" in kind:
        return torch.zeros(shape, device=generator.device)
    if "conv1d" in kind:
        return (torch.rand(shape, **at) * 2 - 1) * shape[-1] ** -0.5
    if "norm" in kind:
        value = torch.zeros if name.endswith("bias") else torch.ones
        return value(shape, device=generator.device)
    if kind == "embed_tokens":
        return torch.randn(shape, **at) * 0.5
    depth = (2 * layers) ** -0.5
    out = kind in ("o_proj", "down_proj", "routed_expert_up_proj") or name.endswith("w2_dense")
    return torch.randn(shape, **at) * (shape[-1] ** -0.5 * (depth if out else 1.0))
