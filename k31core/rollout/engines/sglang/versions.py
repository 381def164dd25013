"""What an SGLang tree or a running server can do, and what a recipe asks beyond it: refused by name before a start.

SGLang's argument parser accepts all of these settings and the server fails minutes later, so the tree's own source is
looked at: the model classes it has, and the check it makes. Nothing of it is imported.
"""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from k31core.recipe.recipe import Recipe
from k31core.rollout.engine import EngineError

K31_BRANCH = "sglang-miles-kimi-k31"
K3_BRANCH = "sglang-miles-k3"
FIRST_WITH_K3 = (0, 5, 17)
FIRST_WITH_ATTN_DP_SIZE = (0, 5, 18)
FIRST_WITH_FLAT_CANDIDATES = (0, 5, 22)
FIRST_WITH_CHECKSUMS = (0, 5, 23)
"""Checksums of an adapter by handle, and weight-update sessions that restore packed weights."""
LAST_RELEASE_READ = (0, 5, 23)
"""Newest release whose source was read: up to here a plain release number says what is missing."""
_RELEASE = re.compile(r"\d+\.\d+\.\d+(?:\.post\d+)?")


class SglangVersionError(EngineError):
    """This SGLang cannot serve the recipe: names the version, what it lacks and where it is found."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What one SGLang can do."""

    version: str
    k3_model: bool
    k31_model: bool
    """The DSA layers of Kimi-K3.1."""
    k3_moe_lora: bool
    """LoRA on K3's latent experts and gated attention output."""
    partial_attention_dp_lora: bool
    """LoRA with attention DP between 1 and TP."""
    weight_sessions: bool = True
    """`expected_checksums`, `/begin_weight_update` and `/end_weight_update`."""

    @property
    def number(self) -> tuple[int, int, int]:
        """The release this version is, or is based on."""
        return parse_version(self.version)

    @property
    def has_attn_dp_size(self) -> bool:
        """`--attn-dp-size` exists."""
        return self.number >= FIRST_WITH_ATTN_DP_SIZE

    @property
    def has_flat_candidates(self) -> bool:
        """Candidates come as base64 arrays."""
        return self.number >= FIRST_WITH_FLAT_CANDIDATES


def parse_version(text: str) -> tuple[int, int, int]:
    """`0.5.23.dev7+g35708f7` → (0, 5, 23). Raises SglangVersionError for anything else."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if not match:
        raise SglangVersionError(f"SGLang calls itself version {text!r}, expected major.minor.patch")
    return int(match[1]), int(match[2]), int(match[3])


def inspect_tree(sglang_path: str | None) -> Abilities:
    """Read the source of the tree that `rollout.engine.sglang_path` names, or of the installed package."""
    package = _find_package(sglang_path)
    models = package / "srt" / "models"
    source = "\n".join(_read(path) for path in sorted(models.glob("kimi*.py")))
    lora = _read(package / "srt" / "lora" / "lora_manager.py")
    routes = _read(package / "srt" / "entrypoints" / "http_server.py")
    return Abilities(
        version=_version_of(package),
        k3_model="class KimiK3" in source,
        k31_model="class KimiK31" in source,
        k3_moe_lora=re.search(r"\bget_hidden_dim\b", source) is not None,
        weight_sessions=routes == "" or "/begin_weight_update" in routes,
        partial_attention_dp_lora="requires --attn-dp-size equal to --tp-size" not in lora,
    )


def abilities_of_server(version: str) -> Abilities:
    """A running server only tells its version: a plain release is known, a branch is taken at its word."""
    stock = _RELEASE.fullmatch(version) is not None and parse_version(version) <= LAST_RELEASE_READ
    return Abilities(
        version=version,
        k3_model=parse_version(version) >= FIRST_WITH_K3,
        k31_model=not stock,
        k3_moe_lora=not stock,
        partial_attention_dp_lora=not stock,
        weight_sessions=not stock or parse_version(version) >= FIRST_WITH_CHECKSUMS,
    )


def require_abilities(recipe: Recipe, has: Abilities) -> None:
    """Raise SglangVersionError listing everything the recipe needs and this SGLang lacks."""
    engine = recipe.rollout.engine
    missing = []
    if not has.k3_model:
        missing.append("no Kimi-K3 model (from 0.5.17 on)")
    if recipe.model.family == "kimi_k31" and not has.k31_model:
        missing.append(f"no Kimi-K3.1 model, its DSA layers are in the branch {K31_BRANCH} only")
    branch = K31_BRANCH if recipe.model.family == "kimi_k31" else K3_BRANCH
    if not has.k3_moe_lora:
        missing.append(f"no LoRA on Kimi-K3's experts and gated attention output (branch {branch})")
    if 1 < engine.attn_dp_size < engine.tp_size and not has.partial_attention_dp_lora:
        missing.append(
            f"no LoRA with attention DP {engine.attn_dp_size} below TP {engine.tp_size} (branch {branch}; "
            f"rollout.engine.attn_dp_size must be 1 or {engine.tp_size} here)"
        )
    by_handle = recipe.sync.transport in ("cuda_ipc", "nccl")
    if recipe.sync.check_lora_weight_equal and by_handle and not has.weight_sessions:
        missing.append("no checksums of an adapter by handle (sync.check_lora_weight_equal, from 0.5.23 on)")
    if recipe.sync.resend_base and not has.weight_sessions:
        missing.append("no session that restores packed weights (sync.resend_base, from 0.5.23 on)")
    if missing:
        raise SglangVersionError(
            f"SGLang {has.version} cannot serve recipe {recipe.name}: {'; '.join(missing)}. "
            f"Set rollout.engine.sglang_path to a checkout of the branch (its python/ folder)"
        )


def _find_package(sglang_path: str | None) -> Path:
    if sglang_path is not None:
        package = Path(sglang_path) / "sglang"
        if not (package / "srt").is_dir():
            raise SglangVersionError(f"rollout.engine.sglang_path {sglang_path}: no sglang/srt in it")
        return package
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SglangVersionError(
            f"SGLang is not installed: use the image, or set rollout.engine.sglang_path to a checkout of {K31_BRANCH}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _version_of(package: Path) -> str:
    match = re.search(r"^__version__.*?=\s*['\"]([^'\"]+)['\"]\s*$", _read(package / "_version.py"), re.MULTILINE)
    if match:
        return match[1]
    for found in importlib.metadata.distributions(name="sglang", path=[str(package.parent)]):
        return found.version
    raise SglangVersionError(f"{package}: neither _version.py nor installed metadata says which version this is")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
