"""An adapter in SGLang's names, back as a logical directory: fails when a name or the configuration is not SGLang's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from k31core.model.build import LORA_TARGETS, LoraSpec

_PREFIX = "base_model.model."


def to_logical(source: Path, target: Path, lora: LoraSpec) -> None:
    """Write `target` with the checkpoint's names. Raises ValueError as SGLang's loader would."""
    config = json.loads((source / "adapter_config.json").read_text())
    write_logical(load_file(source / "adapter_model.safetensors"), config, target, lora)


def write_logical(given: Mapping[str, Tensor], config: Mapping[str, Any], target: Path, lora: LoraSpec) -> None:
    """The same from tensors and a configuration in memory."""
    if (config["peft_type"], config["r"], config["lora_alpha"]) != ("LORA", lora.rank, lora.alpha):
        raise ValueError(f"adapter_config.json has r {config['r']}, lora_alpha {config['lora_alpha']}")
    if not isinstance(config["target_modules"], list) or "w1" in config["target_modules"]:
        raise ValueError(f"target_modules {config['target_modules']} are not PEFT names")
    tensors = {}
    for name, tensor in given.items():
        if not name.startswith(_PREFIX) or "block_sparse_moe" in name:
            raise ValueError(f"unexpected tensor {name}")
        tensors[_logical(name.removeprefix(_PREFIX))] = tensor.contiguous()
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    targets = "all-linear" if set(lora.targets) == set(LORA_TARGETS) else sorted(lora.targets)
    logical = {
        "peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none",
        "task_type": "CAUSAL_LM", "target_modules": targets, "experts_shared_outer_loras": True,
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(logical))


def _logical(name: str) -> str:
    for part in (".experts.", ".shared_experts."):
        name = name.replace(f".mlp{part}", f".block_sparse_moe{part}")
    return name
