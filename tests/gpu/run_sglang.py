"""By hand, on one GPU: SGLang 0.5.17 serves a tiny Kimi-K3 with MXFP4 experts, and our trainer, client and publisher
are held against it.

    python -m tests.gpu.run_sglang --bundle DIR --out DIR [--budget-s 540]

--bundle: a folder with `site17.tar.xz` (SGLang 0.5.17 and what it needs, for Python 3.12 and torch 2.11) and, so that
Marlin need not be compiled there, `jit.tar.xz` (a kernel cache, unpacked into the home folder). The tree is unpacked to
/tmp/sgl17/site, mended (`sglang_patches.py`) and served by our own launcher from a recipe. `DIR/checks.json` and the
server's log are kept whatever happens. Ends with code 1 when a check failed. The checks are `sglang_checks.py`.

Needs torch, triton, numpy, safetensors, psutil, pyyaml and aiohttp beside the bundle; fla-core for the fast KDA.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SITE = Path("/tmp/sgl17/site")
"""Where the prebuilt kernel's sources say they are: another folder would compile it again."""
PORT = 31500


def unpack(bundle: Path) -> Path:
    """The mended tree, made once."""
    from tests.gpu.sglang_patches import apply

    if not (SITE / "sglang").is_dir():
        SITE.mkdir(parents=True)
        subprocess.run(["tar", "-C", str(SITE), "-xJf", str(bundle / "site17.tar.xz")], check=True)
    cache = bundle / "jit.tar.xz"
    if cache.is_file() and not (Path.home() / ".cache" / "tvm-ffi").is_dir():
        subprocess.run(["tar", "-C", str(Path.home()), "-xJf", str(cache)], check=True)
    for line in apply(SITE):
        print("mended", line, flush=True)
    return SITE


async def measure(site: Path, out: Path) -> dict[str, Any]:
    """Checkpoint, trainer, server, checks."""
    from tests.gpu.sglang_checks import open_pair, recipe_for, run_checks, write_model

    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)

    model = write_model(out / "scratch" / "model", small=False)
    say("checkpoint written")
    pair = await open_pair(recipe_for(site, card=True, port=PORT), model, out / "scratch", tolerance=0.1)
    say("trainer and server are up")
    try:
        found = await run_checks(pair, say)
    finally:
        await pair.engine.close()
        pair.trainer.close()
    return {"ready_s": round(time.perf_counter() - began, 1), "checks": found}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=540.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"SGLANG_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    site = unpack(arguments.bundle)
    sys.path.append(str(site))  # aiohttp, pydantic and others are there where the machine's own Python lacks them
    result: dict[str, Any]
    try:
        result = asyncio.run(asyncio.wait_for(measure(site, arguments.out), arguments.budget_s))
    except Exception as error:  # what was seen so far must come back from a machine that is lent for minutes
        result = {"error": f"{type(error).__name__}: {error}"[:2000]}
    (arguments.out / "checks.json").write_text(json.dumps(result, indent=1))
    log = arguments.out / "scratch" / "logs" / "sglang-0.log"
    if log.is_file():
        shutil.copy(log, arguments.out / "server.log")
    shutil.rmtree(arguments.out / "scratch", ignore_errors=True)
    print(json.dumps(result)[:4000], flush=True)
    checks = result.get("checks", {})
    return int(not checks or not all(check["ok"] for check in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
