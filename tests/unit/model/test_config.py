"""config.json: every architecture field is needed, and values we do not compute are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from k31core.model.config import ConfigError, load_config, parse_config
from k31core.model.sizes import KIMI_K3, KIMI_K31
from tests.model_cases import CASES, case_config, config_of


def test_case_is_read() -> None:
    config = load_config(CASES / "tiny-k31")
    assert (config.num_hidden_layers, config.mla_layers, config.kda_num_heads) == (7, (3, 6), 2)
    assert config.dsa is not None and config.dsa.topk == 5
    assert config.padded_a_log == 128 and config.shared_intermediate_size == 64


def test_published_sizes_add_up() -> None:
    assert len(KIMI_K31.mla_layers) == 24 and KIMI_K31.mla_layers[-2:] == (91, 92) and KIMI_K3.dsa is None
    per_layer = KIMI_K31.num_experts * 3 * KIMI_K31.moe_intermediate_size * KIMI_K31.routed_expert_hidden_size
    assert round(per_layer / 1e9, 1) == 29.6
    assert round(92 * per_layer * 0.53125 / 1e12, 2) == 1.45


@pytest.mark.parametrize("section", ["", "linear_attn_config", "dsa_config"])
def test_every_missing_field_is_named(section: str) -> None:
    optional = {
        "model_type",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "use_grouped_topk",
        "quantization_config",
    }
    text = case_config()["text_config"]
    fields = set(text[section] if section else text) - (optional - {"max_position_embeddings", "quantization_config"})
    assert len(fields) >= 4
    for field in fields:
        raw = case_config()
        target = raw["text_config"][section] if section else raw["text_config"]
        del target[field]
        with pytest.raises(ConfigError, match=field):
            parse_config(raw)


CHANGES: list[tuple[str, Any, str]] = [
    ("hidden_act", "silu", "hidden_act.*'silu'"),
    ("mla_use_nope", False, "mla_use_nope"),
    ("num_nextn_predict_layers", 1, "num_nextn_predict_layers"),
    ("moe_router_activation_func", "softmax", "softmax"),
    ("num_hidden_layers", 8, "exactly 1..8"),
    ("hidden_size", "32", "hidden_size.*integer"),
    ("hidden_size", True, "hidden_size.*integer"),
    ("rms_norm_eps", None, "rms_norm_eps.*number"),
    ("num_experts_per_token", 9, "num_experts_per_token 9 exceeds num_experts 8"),
    ("moe_intermediate_size", 48, "moe_intermediate_size.*multiple of 32"),
    ("num_key_value_heads", 1, "num_key_value_heads"),
]


@pytest.mark.parametrize(("field", "value", "message"), CHANGES)
def test_unknown_values_are_refused(field: str, value: Any, message: str) -> None:
    raw = case_config()
    raw["text_config"][field] = value
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def test_layer_lists_and_dsa_must_agree() -> None:
    raw = case_config()
    raw["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"kda_layers \[1, 2, 3, 4, 5, 6\]"):
        parse_config(raw)
    raw = case_config()
    raw["text_config"]["dsa_config"]["dsa_layers"] = [4]
    with pytest.raises(ConfigError, match=r"dsa_layers.*\[4\].*\[4, 7\]"):
        parse_config(raw)
    raw = case_config()
    raw["text_config"]["dsa_config"]["index_top_k"] = raw["text_config"]["dsa_config"].pop("index_topk")
    with pytest.raises(ConfigError, match="index_top_k"):
        parse_config(raw)


def test_family_and_indexer_must_agree() -> None:
    assert parse_config(config_of(layers=4, mla=(4,), k31=False)).dsa is None
    raw = config_of(layers=4, mla=(4,), k31=False)
    raw["text_config"]["dsa_config"] = case_config()["text_config"]["dsa_config"]
    with pytest.raises(ConfigError, match="dsa_config"):
        parse_config(raw)
    raw = case_config()
    raw["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        parse_config(raw)


def test_no_file_and_bad_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_config(tmp_path)
