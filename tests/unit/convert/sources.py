"""Small checkpoints to convert: the tiny case with vision tensors, its Kimi-K3 twin, and experts of real width."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.native import INDEX
from k31core.checkpoint.tensor_file import write_tensor_file

CASE = Path(__file__).parents[2] / "cases" / "model" / "tiny-k31"
VISION = "model-00003-of-00003.safetensors"


def mxfp4_copy(tmp_path: Path) -> Path:
    """The tiny case with vision tensors in a third shard, a tokenizer file and a Python file beside it."""
    source = tmp_path / "mxfp4"
    shutil.copytree(CASE, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    generator = torch.Generator().manual_seed(1)
    vision = {
        "vision_tower.blocks.0.weight": torch.randn(6, 5, generator=generator).bfloat16(),
        "mm_projector.bias": torch.randn(3, generator=generator),
    }
    save_file(vision, source / VISION)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"].update(dict.fromkeys(vision, VISION))
    (source / INDEX).write_text(json.dumps(index))
    return source


def k3_copy(tmp_path: Path) -> Path:
    """The tiny case as Kimi-K3: no indexer."""
    source = tmp_path / "k3"
    source.mkdir()
    config = json.loads((CASE / "config.json").read_text())
    config.update(architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k3")
    del config["text_config"]["dsa_config"]
    (source / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in sorted(CASE.glob("*.safetensors")):
        kept = {name: tensor for name, tensor in load_file(shard).items() if ".indexer." not in name}
        save_file(kept, source / shard.name)
        weight_map.update(dict.fromkeys(kept, shard.name))
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return source


def wide_source(directory: Path, experts: list[int]) -> Path:
    """Random experts of the published widths (16.5 MiB of codes and scales each), `experts[i]` of them in shard i."""
    directory.mkdir(parents=True)
    shutil.copyfile(CASE / "config.json", directory / "config.json")
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    number = 0
    for shard, count in enumerate(experts, start=1):
        tensors = {}
        for _ in range(count):
            stem = f"language_model.model.layers.1.block_sparse_moe.experts.{number}"
            number += 1
            for name, (out, width) in {"w1": (3072, 3584), "w3": (3072, 3584), "w2": (3584, 3072)}.items():
                packed = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=generator)
                scale = torch.randint(110, 130, (out, width // 32), dtype=torch.uint8, generator=generator)
                tensors |= {f"{stem}.{name}.weight_packed": packed, f"{stem}.{name}.weight_scale": scale}
        file = f"model-{shard:05d}-of-{len(experts):05d}.safetensors"
        write_tensor_file(directory / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def change_byte(path: Path, tensor: str, value: int) -> None:
    """Set the first byte of a tensor in a safetensors file."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]] = value
    path.write_bytes(data)


def shard_of(directory: Path, tensor: str) -> Path:
    """The file that holds a tensor."""
    shard: str = json.loads((directory / INDEX).read_text())["weight_map"][tensor]
    return directory / shard
