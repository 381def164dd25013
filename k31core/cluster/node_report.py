"""What one node has: collected on the node itself (standard library and psutil only), compared by `preflight.py`.

Nothing here raises for a missing driver, disk or file: what could not be read is in `unread`, by name.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from k31core.cluster.infiniband import SYSFS_ROOT, NodePorts, read_ports

IMAGE_VARIABLE = "K31_IMAGE_VERSION"
"""Set in the image: its version, the same on every node."""
_CHECKPOINT_FILES = ("config.json", "model.safetensors.index.json", "manifest.json")
_NVIDIA_SMI = "nvidia-smi"
_SMI_FIELDS = "index,name,uuid,memory.total,memory.used,driver_version"


@dataclass(frozen=True, slots=True)
class NodeQuery:
    """What a node is asked."""

    node: str
    """Ray's node id or address: names the node in every message."""
    model_dir: str | None = None
    """Checkpoint directory."""
    save_dir: str | None = None
    """Directory that all nodes share."""
    token: str | None = None
    """File under `save_dir` written by the driver; the node reads it back and answers beside it."""
    infiniband_root: str = str(SYSFS_ROOT)
    nvidia_smi: str = _NVIDIA_SMI


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card."""

    index: int
    name: str
    uuid: str
    memory_total_mib: int
    memory_used_mib: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node at one moment."""

    node: str
    architecture: str
    """`x86_64` or `aarch64`."""
    python: str
    gpus: tuple[Gpu, ...]
    driver: str | None
    nccl: str | None
    ports: NodePorts
    memory_total_bytes: int
    memory_available_bytes: int
    shm_free_bytes: int | None
    locked_memory_limit_bytes: int | None
    """RLIMIT_MEMLOCK; None is unlimited, which InfiniBand needs."""
    save_free_bytes: int | None
    checkpoint_digest: str | None
    """Digest of index, config and the sizes of the shards; None when the directory or its index is not there."""
    checkpoint_bytes: int
    image: str | None
    started_at: float
    """Unix seconds by this node's clock, before and after collecting."""
    finished_at: float
    token_text: str | None
    """What the token file held, read on this node."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Item → why it could not be read."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "NodeReport":
        """Undo `to_json`."""
        values = dict(tree)
        values["gpus"] = tuple(Gpu(**gpu) for gpu in tree["gpus"])
        values["ports"] = NodePorts.from_json(tree["ports"])
        return cls(**values)


def collect(query: NodeQuery) -> NodeReport:
    """Look at this machine."""
    started = time.time()
    unread: dict[str, str] = {}
    gpus, driver = _gpus(query.nvidia_smi, unread)
    memory = psutil.virtual_memory()
    digest, total = _checkpoint(query.model_dir, unread)
    token = _answer_token(query, unread)
    return NodeReport(
        node=query.node,
        architecture=platform.machine(),
        python=platform.python_version(),
        gpus=gpus,
        driver=driver,
        nccl=_nccl(unread),
        ports=read_ports(query.node, Path(query.infiniband_root)),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        shm_free_bytes=_free("/dev/shm", unread),
        locked_memory_limit_bytes=_locked_memory_limit(),
        save_free_bytes=_free(query.save_dir, unread),
        checkpoint_digest=digest,
        checkpoint_bytes=total,
        image=os.environ.get(IMAGE_VARIABLE),
        started_at=started,
        finished_at=time.time(),
        token_text=token,
        unread=unread,
    )


def write_token(save_dir: Path, name: str, text: str) -> None:
    """Driver side: put a file on the shared directory for every node to read back."""
    save_dir.mkdir(parents=True, exist_ok=True)
    path = save_dir / name
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_answers(save_dir: Path, name: str) -> dict[str, str]:
    """Driver side: node → the text it wrote beside the token. A node that is missing wrote somewhere else."""
    answers = {}
    for path in save_dir.glob(f"{name}.answer-*"):
        answers[path.name.partition(".answer-")[2]] = path.read_text(encoding="utf-8")
    return answers


def remove_token(save_dir: Path, name: str) -> None:
    """Driver side: remove the token and its answers."""
    for path in (save_dir / name, *save_dir.glob(f"{name}.answer-*")):
        path.unlink(missing_ok=True)


def _answer_token(query: NodeQuery, unread: dict[str, str]) -> str | None:
    if query.save_dir is None or query.token is None:
        return None
    path = Path(query.save_dir) / query.token
    try:
        text = path.read_text(encoding="utf-8")
        path.with_name(f"{path.name}.answer-{query.node}").write_text(text, encoding="utf-8")
    except OSError as error:
        unread["token"] = f"{path}: {error.strerror or error}"
        return None
    return text


def _gpus(program: str, unread: dict[str, str]) -> tuple[tuple[Gpu, ...], str | None]:
    if shutil.which(program) is None:
        unread["gpus"] = f"{program} is not on the PATH"
        return (), None
    command = [program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        unread["gpus"] = f"{program}: {error}"
        return (), None
    if done.returncode != 0:
        unread["gpus"] = f"{program} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[:300]}"
        return (), None
    gpus, drivers = [], []
    for line in filter(str.strip, done.stdout.splitlines()):
        values = [value.strip() for value in line.split(",")]
        if len(values) != 6 or not (values[0].isdigit() and values[3].isdigit() and values[4].isdigit()):
            unread["gpus"] = f"{program} wrote {line.strip()!r}, expected {_SMI_FIELDS}"
            continue
        gpus.append(Gpu(int(values[0]), values[1], values[2], int(values[3]), int(values[4])))
        drivers.append(values[5])
    return tuple(gpus), drivers[0] if drivers else None


def _nccl(unread: dict[str, str]) -> str | None:
    """Version of the NCCL wheel that torch loads, without importing torch."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    unread["nccl"] = "no nvidia-nccl wheel is installed"
    return None


def _free(path: str | None, unread: dict[str, str]) -> int | None:
    if path is None:
        return None
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        unread[path] = str(error.strerror or error)
        return None


def _locked_memory_limit() -> int | None:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _checkpoint(model_dir: str | None, unread: dict[str, str]) -> tuple[str | None, int]:
    """(digest, bytes of the shards). Reads names, sizes and the small files, never 1.5 TB of weights."""
    if model_dir is None:
        return None, 0
    folder = Path(model_dir)
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        unread["checkpoint"] = f"{index}: {error}"
        return None, 0
    digest, total = hashlib.sha256(), 0
    for name in names:
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            unread["checkpoint"] = f"{folder / name}: {error.strerror or error}"
            return None, total
        total += size
        digest.update(f"{name} {size}\n".encode())
    for name in _CHECKPOINT_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest(), total
