"""What an SGLang cannot do is refused by name; trees are small folders with the lines that decide."""

from pathlib import Path

import pytest

from k31core.recipe.load import load_recipe
from k31core.rollout.engines.sglang.versions import (
    SglangVersionError,
    abilities_of_server,
    inspect_tree,
    parse_version,
    require_abilities,
)

STOCK_LORA = 'raise ValueError("LoRA with DP attention requires --attn-dp-size equal to --tp-size")'


def write_tree(root: Path, version: str, models: str, lora: str = STOCK_LORA) -> str:
    package = root / "sglang"
    (package / "srt" / "models").mkdir(parents=True)
    (package / "srt" / "lora").mkdir()
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    (package / "srt" / "models" / "kimi_k3.py").write_text(models)
    (package / "srt" / "lora" / "lora_manager.py").write_text(lora)
    return str(root)


K3 = "class KimiK3ForConditionalGeneration(Module): pass\n"
K3_LORA = K3 + "    def get_hidden_dim(self): pass\n"
K31_LORA = K3_LORA + "class KimiK31ForConditionalGeneration(Module): pass\n"


def test_versions() -> None:
    assert parse_version("0.5.23") == (0, 5, 23)
    assert parse_version("0.5.22.dev7+g35708f7") == (0, 5, 22)
    with pytest.raises(SglangVersionError, match="calls itself version 'main'"):
        parse_version("main")


def test_stock_cannot_serve_k31_and_says_why(tmp_path: Path) -> None:
    has = inspect_tree(write_tree(tmp_path, "0.5.23", K3))
    with pytest.raises(SglangVersionError) as error:
        require_abilities(load_recipe("k31-32xh200"), has)
    text = str(error.value)
    assert "SGLang 0.5.23 cannot serve recipe k31-32xh200" in text
    assert "no Kimi-K3.1 model, its DSA layers are in the branch sglang-miles-kimi-k31 only" in text
    assert "no LoRA on Kimi-K3's experts" in text
    assert "no LoRA with attention DP 4 below TP 32" in text
    assert "rollout.engine.sglang_path" in text


def test_the_branches_serve_their_recipes(tmp_path: Path) -> None:
    k31 = inspect_tree(write_tree(tmp_path / "a", "0.5.22.dev7+g35708f7", K31_LORA, lora=""))
    require_abilities(load_recipe("k31-32xh200"), k31)
    require_abilities(load_recipe("k31-16xb300"), k31)
    k3 = inspect_tree(write_tree(tmp_path / "b", "0.5.17.dev1", K3_LORA))
    require_abilities(load_recipe("k3-64xgb300"), k3)
    with pytest.raises(SglangVersionError, match=r"no Kimi-K3\.1 model"):
        require_abilities(load_recipe("k31-32xh200"), k3)


def test_stock_lacks_lora_on_k3(tmp_path: Path) -> None:
    has = inspect_tree(write_tree(tmp_path, "0.5.23", K3))
    with pytest.raises(SglangVersionError, match=r"no LoRA on Kimi-K3's experts.*branch sglang-miles-k3"):
        require_abilities(load_recipe("k3-64xgb300"), has)


def test_partial_attention_dp_alone_is_named(tmp_path: Path) -> None:
    has = inspect_tree(write_tree(tmp_path, "0.5.22.dev1", K31_LORA))
    with pytest.raises(SglangVersionError, match=r"attn_dp_size must be 1 or 32 here"):
        require_abilities(load_recipe("k31-32xh200"), has)
    require_abilities(load_recipe("k31-32xh200", ["rollout.engine.attn_dp_size=32"]), has)


@pytest.mark.parametrize(("version", "has_option", "has_flat"), [
    ("0.5.17", False, False), ("0.5.18", True, False), ("0.5.21", True, False), ("0.5.22", True, True),
])  # fmt: skip
def test_what_follows_from_the_number(version: str, has_option: bool, has_flat: bool) -> None:
    has = abilities_of_server(version)
    assert (has.has_attn_dp_size, has.has_flat_candidates) == (has_option, has_flat)


def test_a_running_release_is_known_and_a_branch_is_believed() -> None:
    with pytest.raises(SglangVersionError, match=r"no Kimi-K3\.1 model"):
        require_abilities(load_recipe("k31-32xh200"), abilities_of_server("0.5.23"))
    with pytest.raises(SglangVersionError, match=r"no Kimi-K3 model \(from 0\.5\.17 on\)"):
        require_abilities(load_recipe("k3-64xgb300"), abilities_of_server("0.5.16"))
    require_abilities(load_recipe("k31-32xh200"), abilities_of_server("0.5.22.dev7+g35708f7"))


def test_a_path_without_sglang_is_named(tmp_path: Path) -> None:
    with pytest.raises(SglangVersionError, match=r"sglang_path .*: no sglang/srt in it"):
        inspect_tree(str(tmp_path))


def test_an_absent_installation_names_the_image_and_the_field() -> None:
    with pytest.raises(SglangVersionError, match=r"SGLang is not installed: use the image, or set rollout\.engine"):
        inspect_tree(None)


@pytest.mark.slow
def test_the_released_0_5_23_is_seen_as_it_is() -> None:
    from tests.unit.sglang.sglang_source import install

    has = inspect_tree(str(install()))
    assert (has.version, has.k3_model, has.k31_model, has.k3_moe_lora, has.partial_attention_dp_lora) == (
        "0.5.23", True, False, False, False,
    )  # fmt: skip
