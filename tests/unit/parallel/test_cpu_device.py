"""The CPU context: on while entered, gone afterwards, and still needed by the installed megatron-core."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from k31core.parallel.cpu_device import cpu_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="inert when CUDA exists")


def test_cuda_means_cpu_only_inside() -> None:
    before = torch.cuda.current_device
    with cpu_device():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.ones(1).to(device="cuda:0").device.type == "cpu"
        torch.cuda.synchronize()
    assert torch.cuda.current_device is before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_everything_is_restored_after_an_error() -> None:
    before = torch.cuda.synchronize
    with pytest.raises(KeyError), cpu_device():
        raise KeyError
    assert torch.cuda.synchronize is before


def test_megatron_core_still_needs_it() -> None:
    """When this fails megatron-core has learnt to use its arguments' device: remove `cpu_device`."""
    assert version("megatron-core") == "0.19.2"
    spec = find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    core = Path(next(iter(spec.submodule_search_locations))) / "core"
    assert "torch.cuda.current_device()" in (core / "tensor_parallel" / "mappings.py").read_text()
    assert 'device="cuda"' in (core / "pipeline_parallel" / "schedules.py").read_text()
