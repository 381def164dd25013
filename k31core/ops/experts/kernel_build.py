"""Builds the grouped expert kernel: CUDA source to machine code by NVRTC (torch ships it), loaded by the CUDA driver.

The machine code is cached by the hash of its source in `$XDG_CACHE_HOME/k31/kernels` (default `~/.cache`); the first
build of a tile set takes some 20 s. Everything goes through ctypes, so neither nvcc nor a host compiler is needed.
"""

import ctypes
import hashlib
import logging
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ARCHITECTURE = "sm_90a"
_PARTS = ("kernel_device.cuh", "kernel_producer.cuh", "kernel_grouped.cu")
SERIALISED = b"wgmma.mma_async instructions are serialized"
"""What the assembler says when it cannot keep the products in flight."""

_log = logging.getLogger(__name__)
ENTRIES = ("experts_gate", "experts_down", "experts_down_backward", "experts_gate_backward")
_SMEM_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class KernelBuildError(RuntimeError):
    """NVRTC or the driver refused: carries the compiler's log or the driver's error name."""


@dataclass(frozen=True, slots=True)
class TileSet:
    """The shape of one kernel's tiles."""

    small: int
    """Rows of x, a multiple of 8: the width used when an expert's share fits in it."""
    large: int
    """The width used otherwise; an expert with more rows gets several tiles."""
    groups: int
    """Consumer warpgroups (2 or 4), 128 rows of W each: four hide the decoder's latency where rows are few."""

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return 128 * (1 + self.groups)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: seven stages and the slack that aligns them."""
        x_bytes = -(-self.large // 32) * 32 * 128
        return 7 * (x_bytes + self.groups * 128 * (32 + 2 * 4)) + 1024


TILE_SETS = (TileSet(16, 24, 4), TileSet(64, 64, 2), TileSet(80, 112, 2), TileSet(112, 152, 2))


def choose_tiles(rows: int, experts: int) -> TileSet:
    """The tile set for a mean number of rows per expert; counts stay on the device, so only the mean is known here."""
    mean = rows / experts
    for tiles, most in zip(TILE_SETS, (14, 48, 92), strict=False):
        if mean <= most:
            return tiles
    return TILE_SETS[-1]


def kernel_source(tiles: TileSet) -> str:
    """The CUDA source of one tile set: the generated tensor-core wrappers and the three parts."""
    sizes = f"constexpr int N_SMALL = {tiles.small}, N_LARGE = {tiles.large}, GROUPS = {tiles.groups};"
    head = [sizes, "template <int N> struct WGMMA;"]
    head += [_wgmma_wrapper(n) for n in sorted({tiles.small, tiles.large})]
    return "\n".join(head) + "\n" + "\n".join(Path(__file__).with_name(part).read_text() for part in _PARTS)


def _wgmma_wrapper(n: int) -> str:
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""template <> struct WGMMA<{n}> {{
    static __device__ __forceinline__ void run(float (&d)[{count}], unsigned int (&a)[4], unsigned long long desc) {{
        asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
            "{{{accumulators}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}\\n"
            : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(1));
    }}
}};"""


def compile_cubin(source: str) -> bytes:
    """Machine code for `ARCHITECTURE`; needs no GPU. Raises `KernelBuildError` with the compiler's log."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _ok(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel_grouped.cu", 0, None, None), "create")
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17")
    status = nvrtc.nvrtcCompileProgram(program, 2, options)
    size = ctypes.c_size_t()
    _ok(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "log size")
    log = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetProgramLog(program, log), "log")
    if status:
        raise KernelBuildError(f"NVRTC failed ({status}): {log.value.decode()}")
    if SERIALISED in log.value:
        _log.warning(
            "this compiler serialises the experts' tensor-core products, they will be slow: %s", log.value.decode()
        )
    _ok(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "cubin size")
    cubin = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
    _ok(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)), "destroy")
    return cubin.raw


def cached_cubin(tiles: TileSet) -> bytes:
    """Machine code of a tile set from the cache, built and stored there first when missing."""
    source = kernel_source(tiles)
    key = hashlib.sha256(f"{ARCHITECTURE} {source}".encode()).hexdigest()[:24]
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "k31" / "kernels"
    path = root / f"experts-{tiles.small}-{tiles.large}-{tiles.groups}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_cubin(source)
    root.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_bytes(cubin)
    partial.replace(path)  # atomic: another rank may build the same file
    return cubin


@cache
def kernel_function(tiles: TileSet, entry: str, device_index: int) -> ctypes.c_void_p:
    """Driver handle of one entry point, loaded in the current context (torch's) of `device_index`."""
    if entry not in ENTRIES:
        raise ValueError(f"entry must be one of {ENTRIES}, got {entry!r}")
    cuda = driver()
    function = ctypes.c_void_p()
    check_driver(cuda.cuModuleGetFunction(ctypes.byref(function), _module(tiles, device_index), entry.encode()))
    check_driver(cuda.cuFuncSetAttribute(function, _SMEM_ATTRIBUTE, tiles.shared_bytes))
    return function


@cache
def _module(tiles: TileSet, device_index: int) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    check_driver(driver().cuModuleLoadData(ctypes.byref(module), cached_cubin(tiles)))
    return module


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


def enter_context(device_index: int) -> None:
    """Make torch's (the primary) context current in this thread; autograd's own threads may have none yet."""
    cuda = driver()
    current = ctypes.c_void_p()
    check_driver(cuda.cuCtxGetCurrent(ctypes.byref(current)))
    if current.value is None:
        check_driver(cuda.cuCtxSetCurrent(_primary_context(device_index)))


@cache
def _primary_context(device_index: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check_driver(driver().cuDeviceGet(ctypes.byref(device), device_index))
    check_driver(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


def check_driver(status: int) -> None:
    """Raise `KernelBuildError` with the driver's name for a status that is not success."""
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise KernelBuildError(f"CUDA driver error {status} ({(name.value or b'unknown').decode()})")


def _ok(status: int, step: str) -> None:
    if status:
        raise KernelBuildError(f"NVRTC error {status} at step {step!r}")


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC as torch's own CUDA libraries bring it, else the system's."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    roots = [Path(entry) / "nvidia" for entry in sys.path]
    candidates = [root / part / "lib" / name for root in roots for part in (f"cu{major}", "cuda_nvrtc")]
    found = next((str(path) for path in candidates if path.exists()), name)
    return ctypes.CDLL(found)
