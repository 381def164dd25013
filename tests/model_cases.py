"""Random checkpoints and adapters of the K3 family, and an independent float64 model to compare with.

The reference follows the published mathematics token by token, on a plain dict of tensors; it shares no code with
`k31core` but the E2M1 table it repeats.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from k31core.checkpoint.native import write_native_checkpoint

CASES = Path(__file__).parent / "cases" / "model"
P = "language_model."
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def case_config() -> dict[str, Any]:
    """The `config.json` of the known-answer case, to be changed."""
    return json.loads((CASES / "tiny-k31" / "config.json").read_text())


def config_of(*, layers: int, mla: tuple[int, ...], k31: bool = True, **text: Any) -> dict[str, Any]:
    """A configuration with `layers` layers of which 1-indexed `mla` are full attention; `text` overrides fields."""
    raw = copy.deepcopy(case_config())
    fields, linear = raw["text_config"], raw["text_config"]["linear_attn_config"]
    fields["num_hidden_layers"] = layers
    linear["full_attn_layers"] = list(mla)
    linear["kda_layers"] = [n for n in range(1, layers + 1) if n not in mla]
    linear["num_heads"] = text.pop("kda_heads", linear["num_heads"])
    fields["dsa_config"]["dsa_layers"] = list(mla)
    fields["dsa_config"]["index_topk"] = text.pop("index_topk", 5)
    fields.update(text)
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    if not k31:
        raw["architectures"], raw["model_type"] = ["KimiK3ForConditionalGeneration"], "kimi_k3"
        del fields["dsa_config"]
    return raw


def random_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a random checkpoint with this configuration, in the native layout."""
    c, lin = raw["text_config"], raw["text_config"]["linear_attn_config"]
    g = torch.Generator().manual_seed(seed)
    D, V = c["hidden_size"], c["vocab_size"]
    out: dict[str, Tensor] = {}

    def weight(name: str, *shape: int, std: float | None = None) -> None:
        scale = shape[-1] ** -0.5 if std is None else std
        out[P + name] = (torch.randn(shape, generator=g) * scale).bfloat16()

    def norm(name: str, width: int) -> None:
        out[f"{P}{name}.weight"] = (1 + 0.1 * torch.randn(width, generator=g)).bfloat16()

    weight("model.embed_tokens.weight", V, D, std=1.0)
    weight("lm_head.weight", V, D)
    norm("model.norm", D)
    norm("model.output_attn_res_norm", D)
    weight("model.output_attn_res_proj.weight", 1, D)
    for i in range(c["num_hidden_layers"]):
        L = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            norm(L + name, D)
        weight(L + "self_attention_res_proj.weight", 1, D)
        weight(L + "mlp_res_proj.weight", 1, D)
        A = L + "self_attn."
        if i + 1 in lin["kda_layers"]:
            H, d = lin["num_heads"], lin["head_dim"]
            for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
                weight(f"{A}{name}.weight", H * d, D)
            for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
                weight(f"{A}{name}.weight", H * d, 1, lin["short_conv_kernel_size"])
            weight(A + "f_a_proj.weight", d, D)
            weight(A + "f_b_proj.weight", H * d, d)
            weight(A + "b_proj.weight", H, D)
            norm(A + "o_norm", d)
            weight(A + "o_proj.weight", D, H * d)
            a_log = torch.zeros(-(-H // 128) * 128)
            a_log[:H] = torch.randn(H, generator=g) * 0.3
            out[P + A + "A_log"] = a_log
            out[P + A + "dt_bias"] = torch.randn(H * d, generator=g) - 3
        else:
            H, dn, dr, dv = (
                c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            )
            q, kv = c["q_lora_rank"], c["kv_lora_rank"]
            weight(A + "q_a_proj.weight", q, D)
            norm(A + "q_a_layernorm", q)
            weight(A + "q_b_proj.weight", H * (dn + dr), q)
            weight(A + "kv_a_proj_with_mqa.weight", kv + dr, D)
            norm(A + "kv_a_layernorm", kv)
            weight(A + "kv_b_proj.weight", H * (dn + dv), kv)
            weight(A + "g_proj.weight", H * dv, D)
            weight(A + "o_proj.weight", D, H * dv)
            if "dsa_config" in c:
                s = c["dsa_config"]
                weight(A + "indexer.wq_b.weight", s["index_n_heads"] * s["index_head_dim"], q)
                weight(A + "indexer.wk.weight", s["index_head_dim"], D)
                norm(A + "indexer.k_norm", s["index_head_dim"])
                weight(A + "indexer.k_norm.bias", s["index_head_dim"], std=0.1)
                weight(A + "indexer.weights_proj.weight", s["index_n_heads"], D)
        if i < c["first_k_dense_replace"]:
            F = c["intermediate_size"]
            weight(L + "mlp.gate_proj.weight", F, D)
            weight(L + "mlp.up_proj.weight", F, D)
            weight(L + "mlp.down_proj.weight", D, F)
            continue
        M = L + "block_sparse_moe."
        E, lat, F = c["num_experts"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
        weight(M + "gate.weight", E, D)
        out[P + M + "gate.e_score_correction_bias"] = 0.1 * torch.randn(E, generator=g)
        weight(M + "routed_expert_down_proj.weight", lat, D)
        norm(M + "routed_expert_norm", lat)
        weight(M + "routed_expert_up_proj.weight", D, lat)
        S = F * c["num_shared_experts"]
        weight(M + "shared_experts.gate_proj.weight", S, D)
        weight(M + "shared_experts.up_proj.weight", S, D)
        weight(M + "shared_experts.down_proj.weight", D, S)
        for e in range(E):
            for name, rows, width in (("w1", F, lat), ("w3", F, lat), ("w2", lat, F)):
                key = f"{P}{M}experts.{e}.{name}."
                out[key + "weight_packed"] = torch.randint(0, 256, (rows, width // 2), generator=g, dtype=torch.uint8)
                out[key + "weight_scale"] = torch.randint(122, 125, (rows, width // 32), generator=g, dtype=torch.uint8)
    return out


def random_adapter(raw: dict[str, Any], rank: int, seed: int = 1, *, tied: bool = False) -> dict[str, Tensor]:
    """Logical tensors of a random adapter with every target."""
    c, lin = raw["text_config"], raw["text_config"]["linear_attn_config"]
    g = torch.Generator().manual_seed(seed)
    D = c["hidden_size"]
    out: dict[str, Tensor] = {}

    def pair(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        out[f"{P}{name}.lora_A.weight"] = torch.randn(a, generator=g) * a[-1] ** -0.5
        out[f"{P}{name}.lora_B.weight"] = torch.randn(b, generator=g) * 0.2

    def mlp(name: str, F: int) -> None:
        pair(name + "gate_proj", (rank, D), (F, rank))
        pair(name + "up_proj", (rank, D), (F, rank))
        pair(name + "down_proj", (rank, F), (D, rank))
        if tied:
            out[f"{P}{name}up_proj.lora_A.weight"] = out[f"{P}{name}gate_proj.lora_A.weight"].clone()

    for i in range(c["num_hidden_layers"]):
        L = f"model.layers.{i}."
        if i + 1 in lin["kda_layers"]:
            pair(L + "self_attn.o_proj", (rank, lin["num_heads"] * lin["head_dim"]), (D, rank))
        else:
            pair(L + "self_attn.o_proj", (rank, c["num_attention_heads"] * c["v_head_dim"]), (D, rank))
            pair(L + "self_attn.q_a_proj", (rank, D), (c["q_lora_rank"], rank))
            pair(L + "self_attn.kv_a_proj_with_mqa", (rank, D), (c["kv_lora_rank"] + c["qk_rope_head_dim"], rank))
        if i < c["first_k_dense_replace"]:
            mlp(L + "mlp.", c["intermediate_size"])
            continue
        E, lat, F = c["num_experts"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
        mlp(L + "block_sparse_moe.shared_experts.", F * c["num_shared_experts"])
        X = L + "block_sparse_moe.experts."
        pair(X + "w1", (1, rank, lat), (E, F, rank))
        pair(X + "w3", (1, rank, lat), (E, F, rank))
        pair(X + "w2", (E, rank, F), (1, lat, rank))
    return out


def write_checkpoint(directory: Path, raw: dict[str, Any], seed: int = 0, shard_bytes: int = 100_000) -> Path:
    """A random checkpoint in `directory`."""
    write_native_checkpoint(directory, raw, iter(random_tensors(raw, seed).items()), shard_bytes)
    return directory


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory, by safetensors' own reader."""
    out: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        out.update(load_file(path))
    return out


class ReferenceModel:
    """The decoder in float64 on one sequence: loops where loops are clearest."""

    def __init__(
        self, raw: dict[str, Any], weights: dict[str, Tensor], adapter: dict[str, Tensor] | None, scaling: float
    ):
        self.c = raw["text_config"]
        self.w = {k: v if v.dtype == torch.uint8 else v.double() for k, v in weights.items()}
        self.a = {} if adapter is None else adapter
        self.s = scaling

    def logits(self, tokens: Tensor) -> Tensor:
        """`[n, V]` float64."""
        c = self.c
        s, bank = self.w[P + "model.embed_tokens.weight"][tokens], []
        for i in range(c["num_hidden_layers"]):
            L = f"model.layers.{i}."
            x = self._norm(L + "input_layernorm", self._mix(L + "self_attention_res", bank, s))
            kda = i + 1 in c["linear_attn_config"]["kda_layers"]
            attended = self._kda(L + "self_attn.", x) if kda else self._mla(L + "self_attn.", x)
            if i % c["attn_res_block_size"] == 0:
                bank, s = [*bank, s], attended
            else:
                s = s + attended
            y = self._norm(L + "post_attention_layernorm", self._mix(L + "mlp_res", bank, s))
            s = s + (self._mlp(L + "mlp.", y) if i < c["first_k_dense_replace"] else self._moe(L, y))
        s = self._mix("model.output_attn_res", bank, s)
        return self._norm("model.norm", s) @ self.w[P + "lm_head.weight"].T

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{P}{name}.weight"].T
        A, B = self.a.get(f"{P}{name}.lora_A.weight"), self.a.get(f"{P}{name}.lora_B.weight")
        return y if A is None or B is None else y + self.s * (x @ A.double().T) @ B.double().T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        rms = (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()
        return x / rms * self.w[f"{P}{name}.weight"]

    def _mix(self, name: str, bank: list[Tensor], s: Tensor) -> Tensor:
        if not bank:
            return s
        rows = torch.stack([*bank, s])
        scores = (self._norm(name + "_norm", rows) * self.w[f"{P}{name}_proj.weight"][0]).sum(-1)
        return (scores.softmax(0)[..., None] * rows).sum(0)

    def _situ(self, a: Tensor, b: Tensor) -> Tensor:
        beta, lin = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return beta * torch.tanh(a / beta) * torch.sigmoid(a) * lin * torch.tanh(b / lin)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        h = self._situ(self._linear(name + "gate_proj", x), self._linear(name + "up_proj", x))
        return self._linear(name + "down_proj", h)

    def _kda(self, name: str, x: Tensor) -> Tensor:
        lin = self.c["linear_attn_config"]
        H, d, K = lin["num_heads"], lin["head_dim"], lin["short_conv_kernel_size"]

        def conv(part: str) -> Tensor:
            w = self.w[f"{P}{name}{part}_conv1d.weight"][:, 0]
            u = self._linear(f"{name}{part}_proj", x)
            padded = torch.cat([u.new_zeros(K - 1, u.shape[1]), u])
            y = sum(padded[j : j + len(u)] * w[:, j] for j in range(K))
            return (y * torch.sigmoid(y)).view(-1, H, d)

        q, k, v = conv("q"), conv("k"), conv("v")
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        f = self._linear(name + "f_b_proj", self._linear(name + "f_a_proj", x)) + self.w[P + name + "dt_bias"]
        rate = self.w[P + name + "A_log"][:H].exp()[:, None]
        g = lin["gate_lower_bound"] * torch.sigmoid(rate * f.view(-1, H, d))
        beta = torch.sigmoid(self._linear(name + "b_proj", x))
        S, o = x.new_zeros(H, d, d), []
        for t in range(len(x)):
            S = g[t].exp()[:, :, None] * S
            S = S + beta[t, :, None, None] * k[t, :, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))[:, None]
            o.append(torch.einsum("hkv,hk->hv", S, q[t] * d**-0.5))
        out = self._norm(name + "o_norm", torch.stack(o)).flatten(1)
        return self._linear(name + "o_proj", out * torch.sigmoid(self._linear(name + "g_proj", x)))

    def _mla(self, name: str, x: Tensor) -> Tensor:
        c, n = self.c, len(x)
        H, dn, dr = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        qa = self._norm(name + "q_a_layernorm", self._linear(name + "q_a_proj", x))
        q = self._linear(name + "q_b_proj", qa).view(n, H, dn + dr)
        kv = self._linear(name + "kv_a_proj_with_mqa", x)
        latent, extra = kv[:, : c["kv_lora_rank"]], kv[:, c["kv_lora_rank"] :]
        up = self._linear(name + "kv_b_proj", self._norm(name + "kv_a_layernorm", latent)).view(n, H, -1)
        k = torch.cat([up[..., :dn], extra[:, None].expand(n, H, dr)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (dn + dr) ** -0.5
        allowed = torch.ones(n, n).tril().bool()
        if "dsa_config" in c:
            allowed = self._selected(name + "indexer.", qa.detach(), x.detach())
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        o = torch.einsum("hqk,khd->qhd", weights, up[..., dn:]).flatten(1)
        return self._linear(name + "o_proj", o * torch.sigmoid(self._linear(name + "g_proj", x)))

    def _selected(self, name: str, qa: Tensor, x: Tensor) -> Tensor:
        s, n = self.c["dsa_config"], len(x)
        H, d = s["index_n_heads"], s["index_head_dim"]
        q = self._linear(name + "wq_b", qa).view(n, H, d)
        k = self._linear(name + "wk", x)
        k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + self.c["rms_norm_eps"]).sqrt()
        k = k * self.w[P + name + "k_norm.weight"] + self.w[P + name + "k_norm.bias"]
        w = self._linear(name + "weights_proj", x)
        score = torch.einsum("qh,qhk->qk", w, torch.einsum("qhd,kd->qhk", q, k).relu())
        allowed = torch.zeros(n, n, dtype=torch.bool)
        for t in range(n):
            ranked = sorted(range(t + 1), key=lambda j: (-float(score[t, j]), -j))
            allowed[t, ranked[: s["index_topk"]]] = True
        return allowed

    def _moe(self, layer: str, x: Tensor) -> Tensor:
        c, name = self.c, layer + "block_sparse_moe."
        scores = torch.sigmoid(self._linear(name + "gate", x))
        biased = scores + self.w[P + name + "gate.e_score_correction_bias"]
        chosen = biased.detach().topk(c["num_experts_per_token"], -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        z = self._linear(name + "routed_expert_down_proj", x)
        mixed = torch.stack(
            [
                sum(
                    weights[t, j] * self._expert(name, int(e), z[t : t + 1])[0]
                    for j, e in enumerate(chosen[t].tolist())
                )
                for t in range(len(x))
            ]
        )
        routed = self._linear(name + "routed_expert_up_proj", self._norm(name + "routed_expert_norm", mixed))
        return routed + self._mlp(name + "shared_experts.", x)

    def _expert(self, name: str, e: int, z: Tensor) -> Tensor:
        def run(part: str, x: Tensor) -> Tensor:
            key = f"{P}{name}experts.{e}.{part}."
            packed, scale = self.w[key + "weight_packed"].long(), self.w[key + "weight_scale"].long()
            codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
            W = _E2M1[codes] * torch.exp2((scale - 127).double()).repeat_interleave(32, 1)
            y = x @ W.T
            A = self.a.get(f"{P}{name}experts.{part}.lora_A.weight")
            if A is None:
                return y
            B = self.a[f"{P}{name}experts.{part}.lora_B.weight"]
            A, B = (t[min(e, t.shape[0] - 1)].double() for t in (A, B))
            return y + self.s * (x @ A.T) @ B.T

        return run("w2", self._situ(run("w1", z), run("w3", z)))
