"""Our adapter directory checked and renamed for SGLang, without torch: the file is bytes and a JSON header.

SGLang's loader skips unknown tensor names and trusts shapes, so everything is compared here before a server sees it.
Its names: `…layers.N.mlp.experts.w1.lora_A.weight` where the checkpoint says `block_sparse_moe`.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from k31core.recipe.train import LoraRecipe
from k31core.rollout.engine import AdapterRefusedError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 256 << 20
_EXPONENT = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80)}
"""A value is not finite when all bits of its exponent are set."""

Factors = Mapping[str, tuple[int, ...]]
"""Logical name → shape of every factor that an adapter must have."""


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that may be served."""

    directory: Path
    digest: str
    """As `k31core.checkpoint.adapter_digest` computes it."""
    rank: int
    alpha: float


def expected_factors(text: Mapping[str, Any], lora: LoraRecipe) -> Factors:
    """Every factor of an adapter on the decoder that `text` (the `text_config` of config.json) describes."""
    hidden, rank = text["hidden_size"], lora.rank
    attention = text["linear_attn_config"]
    chosen = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj", "mlp", "shared_experts", "experts"}
    if lora.target_modules != "all-linear":
        chosen = set(lora.target_modules)
    kda_width = attention["num_heads"] * attention["head_dim"]
    mla_width = text["num_attention_heads"] * text["v_head_dim"]
    latent, ffn, experts = text["routed_expert_hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    factors: dict[str, tuple[int, ...]] = {}

    def linear(name: str, fan_in: int, fan_out: int) -> None:
        factors[f"{name}.lora_A.weight"] = (rank, fan_in)
        factors[f"{name}.lora_B.weight"] = (fan_out, rank)

    def feed_forward(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", hidden, width)
        linear(f"{name}.up_proj", hidden, width)
        linear(f"{name}.down_proj", width, hidden)

    for layer in range(text["num_hidden_layers"]):
        at = f"language_model.model.layers.{layer}"
        is_mla = layer + 1 in attention["full_attn_layers"]
        if "o_proj" in chosen:
            linear(f"{at}.self_attn.o_proj", mla_width if is_mla else kda_width, hidden)
        if is_mla and "q_a_proj" in chosen:
            linear(f"{at}.self_attn.q_a_proj", hidden, text["q_lora_rank"])
        if is_mla and "kv_a_proj_with_mqa" in chosen:
            linear(f"{at}.self_attn.kv_a_proj_with_mqa", hidden, text["kv_lora_rank"] + text["qk_rope_head_dim"])
        if layer < text["first_k_dense_replace"]:
            if "mlp" in chosen:
                feed_forward(f"{at}.mlp", text["intermediate_size"])
            continue
        if "shared_experts" in chosen:
            feed_forward(f"{at}.block_sparse_moe.shared_experts", text["num_shared_experts"] * ffn)
        if "experts" in chosen:
            for name in ("w1", "w3"):
                factors[f"{at}.block_sparse_moe.experts.{name}.lora_A.weight"] = (1, rank, latent)
                factors[f"{at}.block_sparse_moe.experts.{name}.lora_B.weight"] = (experts, ffn, rank)
            factors[f"{at}.block_sparse_moe.experts.w2.lora_A.weight"] = (experts, rank, ffn)
            factors[f"{at}.block_sparse_moe.experts.w2.lora_B.weight"] = (1, latent, rank)
    return factors


def check_adapter(directory: Path, factors: Factors, lora: LoraRecipe) -> CheckedAdapter:
    """Read every byte once: configuration, names, shapes, finite values, digest. Raises AdapterRefusedError."""
    config = _read_config(directory)
    targets = "all-linear" if lora.target_modules == "all-linear" else sorted(lora.target_modules)
    seen_targets = config.get("target_modules")
    seen_targets = sorted(seen_targets) if isinstance(seen_targets, list) else seen_targets
    for name, seen, expected in (
        ("r", config.get("r"), lora.rank),
        ("lora_alpha", config.get("lora_alpha"), lora.alpha),
        ("target_modules", seen_targets, targets),
        ("experts_shared_outer_loras", config.get("experts_shared_outer_loras", True), True),
    ):
        if seen != expected:
            raise AdapterRefusedError(f"{directory}: {name} is {seen}, this engine serves {expected}")
    path = directory / WEIGHTS_FILE
    with _open(path) as file:
        header, begin = _read_header(file, path)
        _check_names(path, header, factors)
        digest = hashlib.sha256()
        for name in sorted(header):
            entry = header[name]
            shape = ",".join(map(str, entry["shape"]))
            digest.update(f"{name}\t{entry['dtype']}\t{shape}\n".encode())
            for chunk in _chunks(file, begin, entry):
                _check_finite(path, name, entry["dtype"], chunk)
                digest.update(chunk)
    return CheckedAdapter(directory, digest.hexdigest(), lora.rank, lora.alpha)


def write_for_sglang(adapter: CheckedAdapter, target: Path) -> None:
    """Write `target` with SGLang's names; the values are copied as they are."""
    target.mkdir(parents=True)
    source = adapter.directory / WEIGHTS_FILE
    with _open(source) as file:
        header, begin = _read_header(file, source)
        renamed = {sglang_name(name): entry for name, entry in header.items()}
        text = json.dumps({"__metadata__": {"format": "pt"}, **renamed}).encode()
        text += b" " * (-len(text) % 8)
        with (target / WEIGHTS_FILE).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            file.seek(begin)
            while chunk := file.read(_CHUNK_BYTES):
                out.write(chunk)
    (target / CONFIG_FILE).write_text(json.dumps(sglang_config(adapter.rank, adapter.alpha, renamed), indent=1))


def sglang_name(name: str) -> str:
    """SGLang's name of a logical factor."""
    return "base_model.model." + name.replace(".block_sparse_moe.", ".mlp.")


def sglang_config(rank: int, alpha: float, names: Mapping[str, Any]) -> dict[str, Any]:
    """The PEFT configuration that goes with SGLang's names."""
    peft = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    modules = {name.rsplit(".", 3)[1] for name in names}
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "target_modules": sorted({peft.get(module, module) for module in modules}),
    }


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterRefusedError(f"{path}: {error.strerror}; is this an adapter directory?") from error
    except json.JSONDecodeError as error:
        raise AdapterRefusedError(f"{path}: not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise AdapterRefusedError(f"{path}: expected an object, got {type(tree).__name__}")
    return tree


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise AdapterRefusedError(f"{path}: {error.strerror}; the adapter is incomplete") from error


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise AdapterRefusedError(f"{path}: no safetensors header; the adapter is damaged")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        last = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterRefusedError(f"{path}: its header is no safetensors header ({error})") from error
    if 8 + length + last != size:
        raise AdapterRefusedError(
            f"{path}: {size} bytes, its header describes {8 + length + last}; the adapter is cut off"
        )
    return header, 8 + length


def _check_names(path: Path, header: Mapping[str, Any], factors: Factors) -> None:
    missing, unknown = sorted(factors.keys() - header.keys()), sorted(header.keys() - factors.keys())
    if missing:
        raise AdapterRefusedError(f"{path}: {len(missing)} adapter tensors are missing, first {missing[0]!r}")
    if unknown:
        raise AdapterRefusedError(
            f"{path}: {len(unknown)} tensors are no adapter target of this model, first {unknown[0]!r}"
        )
    for name, entry in header.items():
        if tuple(entry["shape"]) != factors[name]:
            raise AdapterRefusedError(
                f"{path}: {name} has shape {entry['shape']}, this model and rank need {list(factors[name])}"
            )
        if entry["dtype"] not in _EXPONENT:
            raise AdapterRefusedError(f"{path}: {name} has dtype {entry['dtype']}, expected F32 or BF16")


def _chunks(file: BinaryIO, begin: int, entry: Mapping[str, Any]) -> Iterator[bytes]:
    first, last = entry["data_offsets"]
    file.seek(begin + first)
    left = last - first
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        left -= len(chunk)
        yield chunk


def _check_finite(path: Path, name: str, dtype: str, chunk: bytes) -> None:
    kind, exponent = _EXPONENT[dtype]
    bits = np.frombuffer(chunk, dtype=kind)
    if bool(((bits & exponent) == exponent).any()):
        raise AdapterRefusedError(f"{path}: {name} holds a value that is nan or infinite; the adapter is damaged")
