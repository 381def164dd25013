"""Our Triton kernels give the references' values and gradients in Triton's interpreter, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted.py")
CHECKS = ["situ", "attn_res", "logprobs", "topk", "selection", "sparse_attention", "kda_step"]


@pytest.fixture(scope="module")
def outcome():
    """(failed checks, log) of one process that runs them all: the interpreter must be chosen before a kernel is
    imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[3]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *CHECKS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_in_the_interpreter(check, outcome):
    failed, log = outcome
    assert check not in failed, log[-4000:]
