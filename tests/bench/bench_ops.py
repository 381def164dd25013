# ruff: noqa: B023, E731 - every closure is timed before its loop goes on
"""Times of the operators on one GPU, beside what bounds them: `python tests/bench/bench_ops.py [section ..]`.

Sections: floor situ attn_res logprobs topk select attention kda step. Every line is the median of repeated calls
with the L2 cache cleared between them (triton.testing.do_bench), after warm-up, on random data. GB and TB are powers
of ten, GiB and MiB of two.
"""

import math
import sys
import traceback

import torch
import triton

BF16 = torch.bfloat16


def timed(function, rep=120):
    """Median milliseconds."""
    return triton.testing.do_bench(function, warmup=40, rep=rep, return_mode="median")


def gradient(function, leaves):
    """A closure that runs only the backward of `function()` and its median milliseconds."""
    out = function()
    weight = torch.randn_like(out)
    return timed(lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True))


def line(name, milliseconds, *, gigabytes=None, teraflops=None, note=""):
    parts = [f"{name:52s} {milliseconds:9.3f} ms"]
    if gigabytes is not None:
        parts.append(f"{gigabytes / milliseconds:6.2f} TB/s = {gigabytes / milliseconds / FLOOR['copy']:4.0%} of copy")
    if teraflops is not None:
        parts.append(f"{teraflops / milliseconds * 1e3:6.0f} TFLOP/s")
    print("  ".join([*parts, note]), flush=True)


FLOOR = {"copy": 4.3, "mm": 790.0}


def floor():
    a = torch.randn(1 << 30, device="cuda", dtype=BF16)
    b = torch.empty_like(a)
    milliseconds = timed(lambda: b.copy_(a))
    FLOOR["copy"] = 2 * a.numel() * 2 / 1e9 / milliseconds
    line("copy 2 GiB", milliseconds, gigabytes=2 * a.numel() * 2 / 1e9)
    x = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    milliseconds = timed(lambda: x @ x)
    line("matmul 8192^3", milliseconds, teraflops=2 * 8192**3 / 1e12)


def situ():
    from k31core.ops.situ import kernel, reference, situ_glu

    for rows, width, kernel.BLOCK in ((16384, 6144, 4096), (16384, 6144, 2048), (4096, 33792, 2048)):
        wide = torch.randn(rows, 2 * width, device="cuda", dtype=BF16) * 4
        gate, up = (x.detach().requires_grad_() for x in wide.chunk(2, -1))
        size = rows * width * 2 / 1e9
        line(
            f"situ {rows}x{width} block {kernel.BLOCK} forward",
            timed(lambda: situ_glu(gate, up, beta=4.0, linear_beta=25.0)),
            gigabytes=3 * size,
        )
        back = gradient(lambda: situ_glu(gate, up, beta=4.0, linear_beta=25.0), (gate, up))
        line(f"situ {rows}x{width} block {kernel.BLOCK} backward", back, gigabytes=5 * size)
        line("  torch reference forward", timed(lambda: reference.situ_glu(gate, up, beta=4.0, linear_beta=25.0)))


def attn_res():
    from k31core.ops.attn_res import attn_res_mix, kernel, reference

    norm, proj = torch.randn(7168, device="cuda"), torch.randn(1, 7168, device="cuda") * 0.02
    for snapshots in (8, 2):
        rows = [torch.randn(8192, 7168, device="cuda", dtype=BF16).requires_grad_() for _ in range(snapshots + 1)]
        size = 8192 * 7168 * 2 / 1e9
        mix = lambda r=rows: attn_res_mix(r[:-1], r[-1], norm, proj, 1e-5)
        for kernel.TOKENS, kernel.STAGES_FORWARD in ((1, 3), (4, 3), (8, 3), (4, 4)):
            name = f"attn_res n={snapshots} tokens={kernel.TOKENS} stages={kernel.STAGES_FORWARD} forward"
            line(name, timed(mix), gigabytes=(snapshots + 2) * size)
        for kernel.TOKENS, kernel.STAGES_BACKWARD in ((1, 3), (4, 2), (4, 3)):
            back = gradient(mix, rows)
            name = f"attn_res n={snapshots} tokens={kernel.TOKENS} stages={kernel.STAGES_BACKWARD} backward"
            line(name, back, gigabytes=(2 * snapshots + 3) * size)
        line("  torch reference forward", timed(lambda r=rows: reference.attn_res_mix(r[:-1], r[-1], norm, proj, 1e-5)))


def logprobs():
    from k31core.ops.logprobs import kernel, label_and_candidate_logprobs

    tokens, hidden, words, chosen = 4096, 7168, 163840, 128
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16).requires_grad_()
    head = torch.randn(words, hidden, device="cuda", dtype=BF16) / math.sqrt(hidden)
    labels = torch.randint(0, words, (tokens,), device="cuda")
    ids = torch.randint(0, words, (tokens, chosen), device="cuda")
    flops = 2 * tokens * hidden * words / 1e12
    with torch.no_grad():
        bare = timed(lambda: x @ head.T, rep=300)
    line("bare matmul, bf16 logits", bare, teraflops=flops)

    def today():
        return torch.gather(torch.log_softmax((x @ head.T).float(), -1), 1, ids)

    with torch.no_grad():
        line("log_softmax(fp32) + gather", timed(today), note=f"{timed(today) / bare:.2f} x bare")

    def ours():
        label, picked = label_and_candidate_logprobs(x, head, labels, ids, temperature=1.0)
        return picked + label[:, None]

    for kernel.TOKENS, kernel.WORDS in ((4096, 4096), (4096, 8192), (4096, 8448), (4096, 16384), (2048, 16384)):
        with torch.no_grad():
            forward = timed(ours, rep=300)
        line(
            f"ours {kernel.TOKENS} x {kernel.WORDS} forward",
            forward,
            teraflops=flops,
            note=f"{forward / bare:.3f} x bare",
        )
    for kernel.TOKENS, kernel.WORDS in ((4096, 4096), (4096, 8192)):
        back = gradient(ours, (x,))
        line(
            f"ours {kernel.TOKENS} x {kernel.WORDS} backward",
            back,
            teraflops=2 * flops,
            note=f"{back / bare:.2f} x bare",
        )
    buffer = torch.empty(4096, 8192, device="cuda")
    bf16_buffer = torch.empty(4096, 8192, device="cuda", dtype=BF16)
    slab = head[:8192].T
    xd = x.detach()
    line(
        "  one slice 4096 x 8192, fp32 out", timed(lambda: torch.mm(xd, slab, out_dtype=torch.float32, out=buffer)) * 20
    )
    line(
        "  one slice 4096 x 8192, bf16 out", timed(lambda: torch.mm(xd, slab, out=bf16_buffer)) * 20, note="(both x 20)"
    )


def topk():
    from k31core.ops.logprobs import reference, topk_logprobs

    for rows in (1, 32, 128, 512):
        logits = torch.randn(rows, 163840, device="cuda") * 3
        ours = timed(lambda x=logits: topk_logprobs(x, 128))
        line(f"top-128 of {rows} x 163840 fp32", ours, gigabytes=rows * 163840 * 4 / 1e9)
        today = timed(lambda x=logits: (torch.topk(x, 128), torch.logsumexp(x, -1)))
        line("  torch.topk + logsumexp", today, note=f"{today / ours:.1f} x ours")
        if rows == 32:
            line("  full stable sort", timed(lambda x=logits: reference.topk_logprobs(x, 128)))


def select():
    from k31core.ops.dsa import kernel_select, select_keys

    def today(q, k, w, topk):
        """torch: bf16 products, weighted relu sum, causal mask, topk, 512 queries at a time."""
        tokens, position, parts = len(q), torch.arange(len(q), device="cuda"), []
        for begin in range(0, tokens, 512):
            at = slice(begin, begin + 512)
            products = torch.relu((q[at].flatten(0, 1) @ k.T).view(-1, 32, tokens))
            scores = (w[at][:, None] @ products)[:, 0].float()
            scores.masked_fill_(position[None] > position[at, None], float("-inf"))
            parts.append(torch.topk(scores, min(topk, tokens), dim=1).indices)
        return torch.cat(parts)

    for tokens in (2048, 4096, 16384, 65536):
        q, k = (
            torch.randn(tokens, 32, 128, device="cuda", dtype=BF16),
            torch.randn(tokens, 128, device="cuda", dtype=BF16),
        )
        w = torch.randn(tokens, 32, device="cuda", dtype=BF16)
        cu = torch.tensor([0, tokens], device="cuda")
        flops = tokens * tokens * 32 * 128 / 1e12  # the causal half
        ours = timed(lambda a=(q, k, w), c=cu: select_keys(*a, cu_seqlens=c, topk=2048))
        line(f"select 2048 of {tokens}", ours, teraflops=flops)
        if tokens < 65536:
            past = timed(lambda a=(q, k, w): today(*a, 2048))
            line("  torch scores + topk", past, note=f"{past / ours:.1f} x ours")
        if tokens == 16384:
            original = kernel_select._select
            kernel_select._select = _Nothing()
            line(
                "  scores alone",
                timed(lambda a=(q, k, w), c=cu: select_keys(*a, cu_seqlens=c, topk=2048)),
                teraflops=flops,
            )
            kernel_select._select = original


class _Nothing:
    """Stands for a kernel whose time is left out of a measurement."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def attention():
    from k31core.ops.dsa import kernel_attention as kernel
    from k31core.ops.dsa import sparse_latent_attention, sparse_mla_attention

    for tokens, heads in ((16384, 24),):
        q = (torch.randn(tokens, heads, 576, device="cuda", dtype=BF16)).requires_grad_()
        kv = torch.randn(tokens, 576, device="cuda", dtype=BF16).requires_grad_()
        position = torch.arange(tokens, device="cuda")
        ranks = torch.rand(tokens, tokens, device="cuda").masked_fill_(position[None] > position[:, None], -1.0)
        best = ranks.topk(2048, dim=1)
        indices = torch.where(best.values >= 0, best.indices, tokens).sort(1).values
        indices = torch.where(indices == tokens, -1, indices).to(torch.int32)
        del ranks, best
        pairs = int((indices >= 0).sum())
        flops = pairs * heads * 2 * (576 + 512) / 1e12

        run = lambda a=q, b=kv, i=indices: sparse_latent_attention(a, b, i, scale=192**-0.5, value_width=512)
        with torch.no_grad():
            for kernel.KEYS_FORWARD, kernel.WARPS_FORWARD, kernel.STAGES_FORWARD in (
                (32, 4, 2),
                (32, 8, 3),
                (64, 8, 2),
            ):
                shape = f"{kernel.KEYS_FORWARD} keys, {kernel.WARPS_FORWARD} warps"
                line(f"sparse attention {tokens} x {heads} forward ({shape})", timed(run), teraflops=flops)
        line(f"sparse attention {tokens} x {heads} heads backward", gradient(run, (q, kv)), teraflops=2.5 * flops)
        dense = [torch.randn(tokens, heads, w, device="cuda", dtype=BF16).requires_grad_() for w in (192, 192, 128)]
        cu = torch.tensor([0, tokens], device="cuda")
        full = lambda d=dense, c=cu: sparse_mla_attention(*d, None, cu_seqlens=c, scale=192**-0.5)
        with torch.no_grad():
            line(f"dense attention {tokens} x {heads} heads forward", timed(full))
        line(f"dense attention {tokens} x {heads} heads backward", gradient(full, dense))


def kda():
    from fla.ops.kda import chunk_kda

    from k31core.ops.kda import kda_chunk, kda_gate, kda_gated, l2norm

    tokens, heads = 16384, 24
    q, k, v, f = (torch.randn(tokens, heads, 128, device="cuda", dtype=BF16).requires_grad_() for _ in range(4))
    logits = torch.randn(tokens, heads, device="cuda", dtype=BF16).requires_grad_()
    A_log, bias = torch.zeros(heads, device="cuda"), torch.zeros(heads * 128, device="cuda")
    for lengths in ([tokens], [1000] * 16 + [384]):
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda")
        name = f"{len(lengths)} sequences"
        options = {"output_final_state": True, "safe_gate": True, "cu_seqlens": cu}
        inside = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
                  "A_log": A_log, "dt_bias": bias, "lower_bound": -5.0}  # fmt: skip

        direct = lambda o=options: chunk_kda(q[None], k[None], v[None], f[None], logits[None], **o, **inside)[0]
        ours = lambda c=cu: kda_gated(q, k, v, f, logits, A_log, bias, lower_bound=-5.0, cu_seqlens=c)[0]
        qn, kn = l2norm(q.detach()).requires_grad_(), l2norm(k.detach()).requires_grad_()
        g, beta = kda_gate(f.detach(), A_log, bias, -5.0).requires_grad_(), logits.detach().sigmoid().requires_grad_()

        plain_direct = lambda o=options: chunk_kda(qn[None], kn[None], v[None], g[None], beta[None], **o)[0]
        plain = lambda c=cu: kda_chunk(qn, kn, v, g, beta, c)[0]
        for label, leaves, theirs, mine in (
            ("fused gate", (q, k, v, f, logits), direct, ours),
            ("given gate", (qn, kn, v, g, beta), plain_direct, plain),
        ):
            with torch.no_grad():
                a, b = timed(theirs), timed(mine)
            line(f"kda {name}, {label}: fla direct forward", a)
            line(f"kda {name}, {label}: ours forward", b, note=f"{b / a:.3f} x direct")
            a, b = gradient(theirs, leaves), gradient(mine, leaves)
            line(f"kda {name}, {label}: fla direct backward", a)
            line(f"kda {name}, {label}: ours backward", b, note=f"{b / a:.3f} x direct")


def step():
    from k31core.ops.kda import kda_step, reference

    for rows in (32, 256):
        q, k, v, g = (torch.randn(rows, 24, 128, device="cuda") for _ in range(4))
        beta, state = torch.rand(rows, 24, device="cuda"), torch.randn(rows, 24, 128, 128, device="cuda")
        arguments = (q, k, v, -g.abs(), beta, state)
        size = 2 * state.numel() * 4 / 1e9
        line(f"kda step, {rows} rows x 24 heads", timed(lambda a=arguments: kda_step(*a)), gigabytes=size)
        line("  torch reference", timed(lambda a=arguments: reference.kda_step(*a)))


SECTIONS = {f.__name__: f for f in (floor, situ, attn_res, logprobs, topk, select, attention, kda, step)}

if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    torch.manual_seed(0)
    for section in sys.argv[1:] or SECTIONS:
        print(f"--- {section}", flush=True)
        try:
            SECTIONS[section]()
        except Exception:  # one section's failure must not cost the others' lease
            traceback.print_exc(limit=-4)
        torch.cuda.empty_cache()
