"""The architecture of a Kimi-K3 or Kimi-K3.1 checkpoint, read from its `config.json`.

The file decides: a field that is missing, or has a value this implementation does not compute, is refused by name; no
architecture field has a default here. Layer numbers in the file count from 1, in this module from 0.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.recipe.model import DSA_FIELDS

_ARCHITECTURES = {"KimiK3ForConditionalGeneration": "kimi_k3", "KimiK31ForConditionalGeneration": "kimi_k31"}
_REQUIRED_VALUES: dict[str, Any] = {
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
_MXFP4_FORMAT = "mxfp4-pack-quantized"
_MXFP4_BLOCK = 32


class ConfigError(ValueError):
    """A checkpoint configuration that cannot be used: names the field, the value seen and what is expected."""


@dataclass(frozen=True, slots=True)
class DsaConfig:
    """The lightning indexer of the MLA layers (K3.1)."""

    n_heads: int
    head_dim: int
    topk: int
    """Keys each query attends; all causal keys while there are fewer."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the text decoder. `heads` are whole-model counts; a rank's share is the mesh's business."""

    family: str
    """`kimi_k3` or `kimi_k31`."""
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward layers."""
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attn_res_block_size: int
    num_attention_heads: int
    """MLA heads."""
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key part shared by all heads; carried, never rotated."""
    v_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    mla_layers: tuple[int, ...]
    """0-based layers with MLA attention, rising; the others are KDA."""
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    first_k_dense_replace: int
    """The first so many layers have a dense feed-forward."""
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    """Latent width the routed experts work at."""
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    dsa: DsaConfig | None

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which act as one feed-forward."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def padded_a_log(self) -> int:
        """Entries of `A_log` in the file: the heads, zero-padded to a multiple of 128."""
        return -(-self.kda_num_heads // 128) * 128

    def is_mla(self, layer: int) -> bool:
        """Whether 0-based `layer` has MLA attention (else KDA)."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts (else a dense feed-forward)."""
        return layer >= self.first_k_dense_replace


def load_config(model_dir: Path, *, quantized: bool = True) -> ModelConfig:
    """Read `config.json` of an MXFP4 (or, with `quantized` off, a BF16) checkpoint directory.

    Raises `ConfigError` naming the file and the field.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; is this a checkpoint directory?")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error}); download the file again") from error
    return parse_config(raw, str(path), quantized=quantized)


def parse_config(raw: dict[str, Any], where: str = "config.json", *, quantized: bool = True) -> ModelConfig:
    """`ModelConfig` of a parsed `config.json`; `where` names the file in errors."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected an object, got {type(raw).__name__}")
    top = _Fields(raw, where)
    text = top.section("text_config")
    linear = text.section("linear_attn_config")
    family = _family(top)
    for name, value in _REQUIRED_VALUES.items():
        text.expect(name, value)
    linear.expect("use_full_rank_gate", True)
    layers = text.count("num_hidden_layers")
    heads = text.count("num_attention_heads")
    text.expect("num_key_value_heads", heads)
    mla = _layer_split(linear, layers)
    holder = text if "quantization_config" in text.raw else top
    if quantized:
        _check_quantization(holder)
    elif "quantization_config" in holder.raw:
        raise ConfigError(f"{where}: has a quantization_config, a BF16 checkpoint is needed here: convert it first")
    config = ModelConfig(
        family=family,
        hidden_size=text.count("hidden_size"),
        intermediate_size=text.count("intermediate_size"),
        num_hidden_layers=layers,
        vocab_size=text.count("vocab_size"),
        max_position_embeddings=text.count("max_position_embeddings"),
        rms_norm_eps=text.number("rms_norm_eps"),
        attn_res_block_size=text.count("attn_res_block_size"),
        num_attention_heads=heads,
        q_lora_rank=text.count("q_lora_rank"),
        kv_lora_rank=text.count("kv_lora_rank"),
        qk_nope_head_dim=text.count("qk_nope_head_dim"),
        qk_rope_head_dim=text.count("qk_rope_head_dim"),
        v_head_dim=text.count("v_head_dim"),
        kda_num_heads=linear.count("num_heads"),
        kda_head_dim=linear.count("head_dim"),
        short_conv_kernel_size=linear.count("short_conv_kernel_size"),
        gate_lower_bound=linear.number("gate_lower_bound"),
        mla_layers=mla,
        num_experts=text.count("num_experts"),
        num_experts_per_token=text.count("num_experts_per_token"),
        num_shared_experts=text.count("num_shared_experts"),
        first_k_dense_replace=text.count("first_k_dense_replace", at_least=0),
        moe_intermediate_size=text.count("moe_intermediate_size"),
        routed_expert_hidden_size=text.count("routed_expert_hidden_size"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        situ_beta=text.number("activation_situ_beta"),
        situ_linear_beta=text.number("activation_situ_linear_beta"),
        dsa=_dsa(text, family, mla),
    )
    _check_sizes(config, where)
    return config


class _Fields:
    """Typed access to one JSON object whose errors carry the path of the field."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, name: str) -> Any:
        if name not in self.raw:
            raise ConfigError(f"{self.where}: field {name!r} is missing; it has no default")
        return self.raw[name]

    def section(self, name: str) -> "_Fields":
        value = self.get(name)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: field {name!r} must be an object, got {value!r}")
        return _Fields(value, f"{self.where}: {name}")

    def count(self, name: str, *, at_least: int = 1) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigError(f"{self.where}: field {name!r} must be an integer of at least {at_least}, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{self.where}: field {name!r} must be a number, got {value!r}")
        return float(value)

    def layers(self, name: str) -> list[int]:
        value = self.get(name)
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise ConfigError(f"{self.where}: field {name!r} must be a list of layer numbers, got {value!r}")
        return value

    def expect(self, name: str, value: Any) -> None:
        seen = self.get(name)
        if type(seen) is not type(value) or seen != value:
            raise ConfigError(f"{self.where}: field {name!r} is {seen!r}; only {value!r} is implemented")


def _family(top: _Fields) -> str:
    names = top.get("architectures")
    known = [name for name in names if name in _ARCHITECTURES] if isinstance(names, list) else []
    if len(known) != 1:
        raise ConfigError(f"{top.where}: field 'architectures' is {names!r}; known: {sorted(_ARCHITECTURES)}")
    family = _ARCHITECTURES[known[0]]
    top.expect("model_type", family)
    return family


def _layer_split(linear: _Fields, layers: int) -> tuple[int, ...]:
    kda, full = linear.layers("kda_layers"), linear.layers("full_attn_layers")
    if sorted(kda + full) != list(range(1, layers + 1)):
        raise ConfigError(
            f"{linear.where}: kda_layers and full_attn_layers must together be exactly 1..{layers}, "
            f"got kda_layers {kda} and full_attn_layers {full}"
        )
    return tuple(sorted(layer - 1 for layer in full))


def _dsa(text: _Fields, family: str, mla: tuple[int, ...]) -> DsaConfig | None:
    present = text.raw.get("dsa_config") is not None
    if family == "kimi_k3":
        if present:
            raise ConfigError(f"{text.where}: field 'dsa_config' is set, but the architecture is Kimi-K3 (no indexer)")
        return None
    section = text.section("dsa_config")
    extra = sorted(set(section.raw) - set(DSA_FIELDS))
    if extra:
        raise ConfigError(f"{section.where}: unknown fields {extra}; expected exactly {list(DSA_FIELDS)}")
    n_heads, head_dim, topk, dsa_layers = DSA_FIELDS
    listed = section.layers(dsa_layers)
    if sorted(listed) != [layer + 1 for layer in mla]:
        raise ConfigError(
            f"{section.where}: {dsa_layers!r} is {listed}, but full_attn_layers is {[layer + 1 for layer in mla]}"
        )
    return DsaConfig(section.count(n_heads), section.count(head_dim), section.count(topk))


def _check_quantization(holder: _Fields) -> None:
    section = holder.section("quantization_config")
    section.expect("format", _MXFP4_FORMAT)
    for name, group in section.section("config_groups").raw.items():
        weights = _Fields(group, f"{section.where}: config_groups: {name}").section("weights")
        weights.expect("num_bits", 4)
        weights.expect("group_size", _MXFP4_BLOCK)


def _check_sizes(config: ModelConfig, where: str) -> None:
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % _MXFP4_BLOCK:
            raise ConfigError(f"{where}: field {name!r} is {getattr(config, name)}, not a multiple of {_MXFP4_BLOCK}")
    if config.num_experts_per_token > config.num_experts:
        raise ConfigError(
            f"{where}: num_experts_per_token {config.num_experts_per_token} exceeds num_experts {config.num_experts}"
        )
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise ConfigError(
            f"{where}: first_k_dense_replace {config.first_k_dense_replace} exceeds "
            f"num_hidden_layers {config.num_hidden_layers}"
        )
    if config.gate_lower_bound >= 0:
        raise ConfigError(f"{where}: field 'gate_lower_bound' is {config.gate_lower_bound}; a decay needs it negative")
