"""What of the fused experts can be checked without a GPU: it assembles for Hopper, and calls it cannot take say why."""

import logging

import pytest
import torch

from k31core.ops.experts import PackedExperts
from k31core.ops.experts.kernel import unsupported
from k31core.ops.experts.kernel_build import (
    ENTRIES,
    TILE_SETS,
    KernelBuildError,
    TileSet,
    cached_cubin,
    choose_tiles,
    compile_cubin,
    kernel_source,
)

SHARED_MEMORY_OF_A_BLOCK = 227 << 10


def assert_assembles(tiles: TileSet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cubin = compile_cubin(kernel_source(tiles))
    assert cubin[:4] == b"\x7fELF" and all(entry.encode() in cubin for entry in ENTRIES)
    assert "serialises" not in caplog.text


def test_the_smallest_tile_set_assembles_without_serialised_products(caplog: pytest.LogCaptureFixture) -> None:
    assert_assembles(TILE_SETS[0], caplog)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", TILE_SETS[1:])
def test_the_others_too(tiles: TileSet, caplog: pytest.LogCaptureFixture) -> None:
    assert_assembles(tiles, caplog)


def test_a_broken_source_raises_with_the_compilers_words() -> None:
    with pytest.raises(KernelBuildError, match="nonsense"):
        compile_cubin("__global__ void f() { nonsense; }")


def test_the_cache_is_keyed_by_the_source(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("k31core.ops.experts.kernel_build.compile_cubin", lambda source: source[:40].encode())
    first = cached_cubin(TILE_SETS[0])
    assert cached_cubin(TILE_SETS[0]) == first and cached_cubin(TILE_SETS[1]) != first
    assert len(list((tmp_path / "k31" / "kernels").iterdir())) == 2


def test_tiles_fit_the_chip_and_the_rows() -> None:
    for tiles in TILE_SETS:
        assert tiles.small % 8 == 0 and tiles.large % 8 == 0
        assert tiles.shared_bytes < SHARED_MEMORY_OF_A_BLOCK
    assert [choose_tiles(rows, 112) for rows in (1, 1024, 3000, 8192, 32768)] == [TILE_SETS[i] for i in (0, 0, 1, 2, 3)]


def test_calls_the_kernel_cannot_take_say_why() -> None:
    weights = PackedExperts(*(torch.zeros(2, 64, w, dtype=torch.uint8) for w in (32, 2, 32, 2, 32, 2)))
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert "float32" in str(unsupported(x.float(), weights, None, 4.0))
    assert "beta is 3.0" in str(unsupported(x, weights, None, 3.0))
    assert "multiples of 512" in str(unsupported(x, weights, None, 4.0))


def test_the_source_needs_no_header() -> None:
    """NVRTC has no include path of ours: a stray include would fail only where the compiler's headers are missing."""
    for tiles in TILE_SETS:
        assert "#include" not in kernel_source(tiles)
