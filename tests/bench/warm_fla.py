"""Compile the candidates of fla's autotuner in parallel before a timed run: `python tests/bench/warm_fla.py
[processes]`.

fla tries about two hundred kernel variants the first time our shapes are seen, one after the other, most of the time
in the compiler. Each process here takes every n-th candidate and leaves its binary in Triton's disk cache; the timed
run then only measures. The autotuner's choice itself is not touched (FLA_CACHE_RESULTS=0).
"""

import multiprocessing
import os
import sys
import time


def compile_share(rank: int, processes: int) -> None:
    os.environ["FLA_CACHE_RESULTS"] = "0"
    import torch
    from triton.runtime import autotuner

    full = autotuner.Autotuner.prune_configs
    autotuner.Autotuner.prune_configs = lambda self, kw: full(self, kw)[rank::processes] or full(self, kw)[:1]
    from k31core.ops.kda import kda_chunk, kda_gated

    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, f = (make(512, 24, 128).requires_grad_() for _ in range(4))
    beta, g = make(512, 24).requires_grad_(), (-torch.rand(512, 24, 128, device="cuda")).requires_grad_()
    cu = torch.tensor([0, 200, 512], device="cuda")
    state = torch.zeros(2, 24, 128, 128, device="cuda")
    rate = torch.rand(512, 24, device="cuda").requires_grad_()
    kda_chunk(q, k, v, g, rate, cu, state)[0].sum().backward()
    rates = torch.zeros(24, device="cuda"), torch.zeros(24 * 128, device="cuda")
    kda_gated(q, k, v, f, beta, *rates, lower_bound=-5.0, cu_seqlens=cu, initial_state=state)[0].sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    begin = time.time()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_share, args=(rank, count)) for rank in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{count} processes, {time.time() - begin:.0f} s, exit codes {[w.exitcode for w in workers]}")
