"""Experts at the recipe's shapes on one GPU: time, FLOPs, share of the floor, ratio to dequantise + grouped GEMM.

Run by hand: `python tests/bench/bench_experts.py [--out results.json]`; `--table results.json` prints the table of a
saved run without a GPU. Inputs are random, times are medians of CUDA events. The floor of a shape is the larger of
its FLOPs over the matrix rate and its bytes (each read or written once) over the copy bandwidth, measured in the run.
"""

import argparse
import json
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31core.ops.experts import ExpertLora, PackedExperts, expert_mlp
from k31core.ops.experts import kernel_launch as launch
from k31core.ops.experts.kernel_build import TileSet
from tests.bench.device_time import milliseconds

EXPERTS, LATENT, FFN, RANK = 112, 3584, 3072, 32
FLOPS_PER_ROW = 2 * 3 * LATENT * FFN


@triton.jit
def dequantise_kernel(packed, scale, out, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(packed + byte).to(tl.int32)
    s = tl.load(scale + byte // 16).to(tl.int32)
    factor = (s << 23).to(tl.float32, bitcast=True)
    low = ((b & 8) << 28) | ((b & 7) << 22)
    high = ((b & 128) << 24) | ((b & 112) << 18)
    huge = 8.507059173023462e37  # 2^126
    low_f = low.to(tl.float32, bitcast=True) * huge * factor
    high_f = high.to(tl.float32, bitcast=True) * huge * factor
    tl.store(
        out + tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK),
        tl.interleave(low_f, high_f).to(tl.bfloat16),
    )


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, device=packed.device, dtype=torch.bfloat16)
    dequantise_kernel[(packed.numel() // 2048,)](packed, scale, out, BLOCK=2048)
    return out


def peer_forward(x: Tensor, offsets: Tensor, weights: PackedExperts) -> Tensor:
    """What people use today: dense weights for the layer, then grouped GEMMs and an unfused activation."""
    w1, w3, w2 = (dequantise(*pair) for pair in zip(weights.tensors()[::2], weights.tensors()[1::2]))
    return peer_products(x, offsets, w1, w3, w2)


def peer_products(x: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    a = torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets)
    b = torch._grouped_mm(x, w3.transpose(1, 2), offs=offsets)
    a32, b32 = a.float(), b.float()
    h = (4 * torch.tanh(a32 / 4) * torch.sigmoid(a32) * 25 * torch.tanh(b32 / 25)).to(x.dtype)
    return torch._grouped_mm(h, w2.transpose(1, 2), offs=offsets)


def make_weights() -> PackedExperts:
    def one(rows: int, width: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(0, 256, (EXPERTS, rows, width // 2), dtype=torch.uint8, device="cuda")
        return packed, torch.randint(117, 121, (EXPERTS, rows, width // 32), dtype=torch.uint8, device="cuda")

    return PackedExperts(*one(FFN, LATENT), *one(FFN, LATENT), *one(LATENT, FFN))


def make_lora() -> ExpertLora:
    inner, outer = ((1, RANK, LATENT), (EXPERTS, FFN, RANK)), ((EXPERTS, RANK, FFN), (1, LATENT, RANK))
    factors = [
        torch.randn(s, device="cuda").mul(s[-1] ** -0.5).bfloat16().requires_grad_() for s in (*inner, *inner, *outer)
    ]
    return ExpertLora(*factors, scaling=2.0)


def make_counts(kind: str, rows: int) -> Tensor:
    if kind == "even":
        counts = torch.full((EXPERTS,), rows // EXPERTS)
        counts[: rows % EXPERTS] += 1
    elif kind == "random":
        counts = torch.bincount(torch.randint(0, EXPERTS, (rows,)), minlength=EXPERTS)
    else:  # one expert has half of the rows, eight have none
        counts = torch.bincount(torch.randint(9, EXPERTS, (rows - rows // 2,)), minlength=EXPERTS)
        counts[4] = rows // 2
    return counts.cuda()


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(big)
    return {
        "matmul_tflops": 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9,
        "copy_tb_s": 2 * big.numel() / milliseconds(lambda: target.copy_(big)) / 1e9,
    }


def bench_shape(weights: PackedExperts, lora: ExpertLora, kind: str, rows: int, tiles: TileSet | None = None) -> dict:
    counts = make_counts(kind, rows)
    x = torch.randn(rows, LATENT, device="cuda", dtype=torch.bfloat16)
    groups = launch.Groups.of(x, counts, weights, 25.0)
    if tiles:
        groups = launch.Groups(groups.counts, weights, rows, 25.0, tiles)
    h, y, dx = x.new_empty(rows, FFN), torch.empty_like(x), torch.empty_like(x)
    pre, dpre, dy = x.new_empty(rows, 2 * FFN), x.new_empty(rows, 2 * FFN), torch.randn_like(x)
    launch.gate(groups, x, None, h, pre)

    def forward() -> None:
        launch.gate(groups, x, None, h, None)
        launch.down(groups, h, None, y)

    def backward() -> None:
        launch.down_backward(groups, dy, None, pre, dpre, None)
        launch.gate_backward(groups, dpre, None, dx)

    result = {
        "kind": kind,
        "rows": rows,
        "tiles": [groups.tiles.small, groups.tiles.large],
        "gate_ms": milliseconds(lambda: launch.gate(groups, x, None, h, None)),
        "gate_saving_ms": milliseconds(lambda: launch.gate(groups, x, None, h, pre)),
        "down_ms": milliseconds(lambda: launch.down(groups, h, None, y)),
        "forward_ms": milliseconds(forward),
        "down_backward_ms": milliseconds(lambda: launch.down_backward(groups, dy, None, pre, dpre, None)),
        "gate_backward_ms": milliseconds(lambda: launch.gate_backward(groups, dpre, None, dx)),
        "backward_ms": milliseconds(backward),
    }
    result["forward_tflops"] = rows * FLOPS_PER_ROW / result["forward_ms"] / 1e9
    if tiles:
        return result
    with torch.no_grad():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = expert_mlp(x, counts, weights)
        result["transient_gib"] = (torch.cuda.max_memory_allocated() - before - out.numel() * 2) / 2**30
        result["operator_ms"] = milliseconds(lambda: expert_mlp(x, counts, weights))
        result["operator_lora_ms"] = milliseconds(lambda: expert_mlp(x, counts, weights, lora=lora))
    x.requires_grad_()
    for name, bypass, leaves in (("", None, [x]), ("_lora", lora, [x, *lora.factors()])):
        out = expert_mlp(x, counts, weights, lora=bypass)
        result[f"operator_backward{name}_ms"] = milliseconds(
            lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, dy, retain_graph=True)
        )
    return result


def bench_peer(weights: PackedExperts, rows: int) -> dict[str, float]:
    counts = make_counts("even", rows)
    x = torch.randn(rows, LATENT, device="cuda", dtype=torch.bfloat16)
    offsets = counts.cumsum(0).int()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = peer_forward(x, offsets, weights)
    peak = (torch.cuda.max_memory_allocated() - before - out.numel() * 2) / 2**30
    ours = expert_mlp(x, counts, weights)
    error = float((ours.float() - out.float()).norm() / out.float().norm())
    dense = [dequantise(*pair) for pair in zip(weights.tensors()[::2], weights.tensors()[1::2])]
    return {
        "rows": rows,
        "peer_ms": milliseconds(lambda: peer_forward(x, offsets, weights), 7),
        "peer_dense_products_ms": milliseconds(lambda: peer_products(x, offsets, *dense), 7),
        "peer_transient_gib": peak,
        "difference_ours_to_peer": error,
    }


def floor_ms(rows: int, ceilings: dict[str, float]) -> tuple[float, float]:
    """(floor in ms, bytes) of the forward at a shape where every expert has rows."""
    weights = EXPERTS * 3 * LATENT * FFN * (1 / 2 + 1 / 32)
    moved = weights + rows * 2 * (2 * LATENT + 2 * FFN)  # x and y once, h written and read
    return max(rows * FLOPS_PER_ROW / ceilings["matmul_tflops"] / 1e9, moved / ceilings["copy_tb_s"] / 1e9), moved


def table(results: dict) -> str:
    """Markdown: one line a shape."""
    limits, peer = results["ceilings"], results["peer"]
    lines = [
        f"{results['device']}, torch {results['torch']}: bf16 matrix product {limits['matmul_tflops']:.0f} TFLOP/s, "
        f"device copy {limits['copy_tb_s']:.2f} TB/s. Dequantise + grouped GEMM at {peer['rows']} rows: "
        f"{peer['peer_ms']:.2f} ms ({peer['peer_dense_products_ms']:.2f} ms on weights already dense), "
        f"{peer['peer_transient_gib']:.2f} GiB transient; "
        f"outputs differ by {peer['difference_ours_to_peer']:.1e} (norm).",
        "",
        "| rows | routing | forward ms | TFLOP | GB | TFLOP/s | share of floor | peer / ours | + LoRA | backward ms | "
        "/ forward | backward + LoRA ms | transient GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["shapes"]:
        if "operator_ms" not in r:
            continue
        floor, moved = floor_ms(r["rows"], limits)
        ratio = f"{peer['peer_ms'] / r['forward_ms']:.2f}" if r["rows"] == peer["rows"] else "-"
        cells = (
            f"{r['rows']} | {r['kind']} | {r['forward_ms']:.2f}",
            f"{r['rows'] * FLOPS_PER_ROW / 1e12:.2f} | {moved / 1e9:.2f}",
            f"{r['forward_tflops']:.0f} | {floor / r['forward_ms']:.0%} | {ratio}",
            f"{r['operator_lora_ms'] / r['operator_ms']:.3f} | {r['backward_ms']:.2f}",
            f"{r['backward_ms'] / r['forward_ms']:.2f}",
            f"{r['operator_backward_lora_ms']:.2f} | {r['transient_gib']:.3f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="also time other tile sets")
    parser.add_argument("--table", type=Path, help="print the table of a saved run and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    torch.manual_seed(0)
    weights, lora = make_weights(), make_lora()
    results: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceilings(),
    }
    print(json.dumps(results), flush=True)
    rows: list[dict] = []
    for kind, number in (("even", 32768), ("random", 32768), ("skew", 32768), ("random", 8192), ("random", 1024)):
        rows.append(bench_shape(weights, lora, kind, number))
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True)
    if arguments.sweep:
        for kind, number, tiles in (
            ("even", 32768, TileSet(64, 64, 2)),
            ("random", 32768, TileSet(80, 112, 2)),
            ("random", 8192, TileSet(64, 64, 2)),
            ("random", 8192, TileSet(112, 152, 2)),
            ("random", 1024, TileSet(80, 112, 2)),
        ):
            rows.append(bench_shape(weights, lora, kind, number, tiles))
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True)
    results["shapes"] = rows
    results["peer"] = bench_peer(weights, 32768)
    print(json.dumps(results["peer"]), flush=True)
    print(table(results))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
