"""Tests of agreement need no tuned kernels: fla's autotuner gets two candidates a kernel instead of two hundred in all.

Compiled one after the other, two hundred take longer than a test may. Which one is taken changes the speed, not the
result.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def few_candidates() -> Iterator[None]:
    """Until it is left, Triton's autotuner looks at two candidates a kernel, and fla remembers no choice."""
    from triton.runtime.autotuner import Autotuner

    every: Any = Autotuner.prune_configs
    remembered = os.environ.get("FLA_CACHE_RESULTS")
    Autotuner.prune_configs = lambda self, kwargs: every(self, kwargs)[:2]
    os.environ["FLA_CACHE_RESULTS"] = "0"
    try:
        yield
    finally:
        Autotuner.prune_configs = every
        if remembered is None:
            del os.environ["FLA_CACHE_RESULTS"]
        else:
            os.environ["FLA_CACHE_RESULTS"] = remembered
