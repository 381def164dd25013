"""What SGLang 0.5.17 lacks for Kimi-K3, mended in an unpacked copy: each change says why, and must find its place.

`python tests/gpu/sglang_patches.py SITE` changes the tree in place; a second time it changes nothing. Later releases
need fewer: a patch whose place is gone is an error, to be looked at.
"""

import sys
from dataclasses import dataclass
from pathlib import Path


class PatchError(ValueError):
    """A place that is not there (or is there twice): names file and patch."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement."""

    file: str
    why: str
    old: str
    new: str
    """Empty `old`: appended to the file."""


HIDDEN_DIMS = '''

def _dims_of_lora_module(self, module_name, layer_idx):
    """Experts work on the latent width; the dense and the shared feed-forwards have their own."""
    from sglang.srt.lora.utils import get_hidden_dim

    text = getattr(self.config, "text_config", self.config)
    latent, ffn = text.routed_expert_hidden_size or text.hidden_size, text.moe_intermediate_size
    wide = text.intermediate_size if layer_idx < text.first_k_dense_replace else ffn * text.num_shared_experts
    known = {
        "gate_up_proj_moe": (latent, 2 * ffn),
        "down_proj_moe": (ffn, latent),
        "gate_up_proj": (text.hidden_size, 2 * wide),
        "down_proj": (wide, text.hidden_size),
    }
    return known.get(module_name) or get_hidden_dim(module_name, text, object(), layer_idx)


KimiK3ForConditionalGeneration.get_hidden_dim = _dims_of_lora_module
KimiK3LinearForCausalLM.get_hidden_dim = _dims_of_lora_module
'''
MARLIN = "        if runner_backend.is_marlin():\n"
FROM_QUANTIZATION = "            from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (\n"
PLAIN_SILU = "        silu_and_mul(intermediate_cache1.view(-1, 2 * N), intermediate_cache2)\n"
ONLY_SILU = 'assert runner_config.activation == "silu", "Only SiLU activation is supported."'
NINJA = '    """Build the module in the given build directory using ninja."""\n'
INTERLEAVED = 'getattr(base_layer.moe_runner_config, "gemm1_alpha", None) is not None\n'

PATCHES = (
    Patch(
        "sglang/srt/models/kimi_k3.py",
        "the router's TopK does not know its layer, so no expert choices are returned (upstream from 0.5.22)",
        "            top_k=config.num_experts_per_token,\n            renormalize=moe_renormalize,",
        "            top_k=config.num_experts_per_token,\n            layer_id=self.layer_idx,\n"
        "            renormalize=moe_renormalize,",
    ),
    Patch("sglang/srt/models/kimi_k3.py", "LoRA buffers of latent experts get the model's width", "", HIDDEN_DIMS),
    Patch(
        "sglang/srt/lora/layers.py",
        "SiTU sets gemm1_alpha, but K3's gate and up rows are not interleaved",
        INTERLEAVED + "        )",
        INTERLEAVED + '            and base_layer.moe_runner_config.activation != "situ"\n        )',
    ),
    Patch(
        "sglang/srt/lora/layers.py",
        "MXFP4 experts under Marlin have quantisation info of their own",
        MARLIN + FROM_QUANTIZATION,
        '        if runner_backend.is_marlin() and type(base_layer.quant_method).__name__ == "Mxfp4MoEMethod":\n'
        "            from sglang.srt.layers.quantization.mxfp4_marlin_moe import build_marlin_moe_quant_info\n\n"
        "            self._quant_info = build_marlin_moe_quant_info(base_layer)\n"
        "        elif runner_backend.is_marlin():\n" + FROM_QUANTIZATION,
    ),
    Patch(
        "sglang/srt/lora/lora_moe_runner_marlin.py",
        "the Marlin LoRA runner refuses SiTU",
        ONLY_SILU,
        'assert runner_config.activation in ("silu", "situ"), "Only SiLU and SiTU are supported."',
    ),
    Patch(
        "sglang/srt/lora/lora_moe_runner_marlin.py",
        "and computes SiLU always",
        PLAIN_SILU,
        '        if runner_config.activation == "situ":\n'
        "            from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import situ_and_mul\n\n"
        "            beta, limit = runner_config.gemm1_alpha or 4.0, runner_config.gemm1_clamp_limit\n"
        "            situ_and_mul(intermediate_cache2, intermediate_cache1.view(-1, 2 * N), beta, limit)\n"
        "        else:\n    " + PLAIN_SILU,
    ),
    Patch(
        "tvm_ffi/cpp/extension.py",
        "a kernel that was built elsewhere is used as it is: nvcc takes minutes on the card's machine",
        NINJA,
        NINJA + '    if any(__import__("pathlib").Path(build_dir).glob("*.so")):\n        return\n',
    ),
)

LAUNCHER = '''"""`python -m sglang.launch_server`, text only, for a checkpoint of the vision architecture."""

import argparse
import os

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args()
    arguments.enable_multimodal = False
    try:
        launch_server(ServerArgs.from_cli_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
'''


def apply(site: Path) -> list[str]:
    """Mend the tree at `site` and put the launcher into it; returns what was changed. Raises PatchError."""
    changed = []
    for patch in PATCHES:
        path = site / patch.file
        text = path.read_text(encoding="utf-8")
        if patch.new in text:
            continue
        if patch.old and text.count(patch.old) != 1:
            count = text.count(patch.old)
            raise PatchError(f"{path}: the place for {patch.why!r} is there {count} times, expected once")
        path.write_text(text.replace(patch.old, patch.new) if patch.old else text + patch.new, encoding="utf-8")
        changed.append(f"{patch.file}: {patch.why}")
    (site / "sglang" / "launch_server.py").write_text(LAUNCHER, encoding="utf-8")
    return changed


if __name__ == "__main__":
    print("\n".join(apply(Path(sys.argv[1]))) or "nothing to change")
