"""Packages that must start fast import with torch (and megatron, and SGLang) blocked."""

import subprocess
import sys

import pytest

BLOCKER = """
import importlib.abc, importlib, pkgutil, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "megatron", "sglang", "triton"}:
            raise ImportError(f"{name} is blocked: this package must import without it")

sys.meta_path.insert(0, Block())
skip = tuple(sys.argv[2:])
root = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(root, "__path__", []), root.__name__ + "."):
    if not module.name.startswith(skip or ("-",)):
        importlib.import_module(module.name)
"""

PACKAGES = [
    ("k31core.recipe",),
    ("k31core.rl.types",),
    ("k31core.observe",),
    ("k31core.grading",),
    ("k31core.report",),
    ("k31core.cluster",),
    ("k31core.cli",),
    ("k31core.rollout", "k31core.rollout.engines.embedded"),
    ("tasks",),
    ("flows",),
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p[0])
def test_imports_without_torch(package: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKER, *package], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_blocker_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKER, "k31core.ops.mxfp4"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr
