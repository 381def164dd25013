"""How fast an answer of full size is decoded and checked, in MB of payload a second on one core.

    OMP_NUM_THREADS=1 python -m tests.bench.bench_sglang_payload

CPU time of this process, the best of several runs: other work on the machine does not count against it. The answer has
4,096 tokens after a prompt of 1,024, 128 candidates a token, and the routing of 93 layers x 16 experts.
"""

import time
from collections.abc import Callable

import numpy as np
import orjson

from k31core.rollout.engines.sglang.payload import Answer, ModelShape, decode_answer
from tests.unit.sglang.answers import VERSION, make, text_of

SHAPE = ModelShape(163840, 93, 896, 16)
ROWS, K, PROMPT, RUNS = 4096, 128, 1024, 7


def best_cpu_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    made = make(ROWS, K, PROMPT, shape=SHAPE)
    for name, flat in (("binary candidates (SGLang >= 0.5.22)", True), ("nested candidates (older)", False)):
        body = text_of(made, flat=flat)
        answer = Answer(body, "bench", VERSION)
        done = decode_answer(answer, made.request, SHAPE)
        assert np.array_equal(done.top_logprobs, made.top_logprobs)
        assert np.array_equal(done.routing, made.routing)
        seconds = best_cpu_seconds(lambda a=answer: decode_answer(a, made.request, SHAPE))
        parsed = best_cpu_seconds(lambda b=body: orjson.loads(b))
        size = len(body) / 1e6
        print(
            f"{name}: {size:.1f} MB, decoded and checked in {seconds * 1e3:.0f} ms = {size / seconds:.0f} MB/s; "
            f"orjson alone (objects, nothing checked): {size / parsed:.0f} MB/s"
        )


if __name__ == "__main__":
    main()
