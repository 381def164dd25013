"""One arithmetic thread for every test process: results and times must not depend on what else the machine does."""

import os

# Before torch is imported anywhere; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
# `uv run pytest` has uv among its ancestors: Ray would start each of its workers through uv, in a copy of this tree.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
