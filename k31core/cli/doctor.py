"""`k31 doctor`: what is missing on this machine, and how to get it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    what: str
    state: str
    """`ok`, `missing` (a run cannot work) or `optional` (only some recipes need it)."""
    seen: str
    advice: str = ""


def doctor(
    recipe: Annotated[str, typer.Option(help="Recipe that is to run here.")] = "tiny",
    save_dir: Annotated[Path, typer.Option(help="Where run directories are made.")] = Path("runs"),
) -> None:
    """Say what is missing on this machine for a recipe, and how to get it. Exit code 1 when something is."""
    from rich.console import Console
    from rich.table import Table

    from k31core.recipe.load import load_recipe

    wanted = load_recipe(recipe)
    gpu = wanted.train.device == "cuda"
    sglang = wanted.rollout.engine.kind == "sglang"
    looks: list[Callable[[], Check]] = [
        check_python,
        check_uv,
        *(
            lambda name=name: check_package(name)
            for name in ("torch", "megatron-core", "prefect", "ray", "math-verify")
        ),
        check_memory,
        lambda: check_disk(save_dir),
        check_shared_memory,
        check_loopback,
        lambda: check_gpu(needed=gpu),
        lambda: check_optional("sglang", needed=sglang, advice="the branch that docs/runbook.md names"),
        lambda: check_optional("fla-core", needed=gpu, advice="uv sync --extra gpu"),
        check_wandb,
    ]
    checks = [look() for look in looks]
    table = Table("", "state", "seen", "what to do", title=f"for recipe {recipe}", title_justify="left")
    colour = {"ok": "green", "optional": "yellow", "missing": "bold red"}
    for check in checks:
        table.add_row(check.what, f"[{colour[check.state]}]{check.state}[/]", check.seen, check.advice)
    Console().print(table)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def check_python() -> Check:
    """Python 3.12, which megatron-core 0.19.2 and the lock need."""
    good = sys.version_info[:2] == (3, 12)
    return Check(
        "Python", "ok" if good else "missing", platform.python_version(), "" if good else "uv python install 3.12"
    )


def check_uv() -> Check:
    """uv installs from the lock."""
    path = shutil.which("uv")
    return Check("uv", "ok" if path else "optional", path or "not found", "" if path else "python -m pip install uv")


def check_package(name: str) -> Check:
    """A dependency of the lock, by its metadata (importing it would take seconds)."""
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", "uv sync")


def check_optional(name: str, *, needed: bool, advice: str) -> Check:
    """An extra that only some recipes need."""
    found = check_package(name)
    if found.state == "ok":
        return found
    return Check(name, "missing" if needed else "optional", "not installed", advice)


def check_memory() -> Check:
    """The tiny recipe peaks below 6 GiB over all processes."""
    import psutil

    free = psutil.virtual_memory().available / GIB
    advice = "" if free >= 6 else "close something: the tiny recipe needs 6 GiB"
    return Check("free memory", "ok" if free >= 6 else "missing", f"{free:.1f} GiB, {os.cpu_count()} cores", advice)


def check_disk(save_dir: Path) -> Check:
    """Room for run directories, and permission to write there."""
    place = save_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    if not os.access(place, os.W_OK):
        return Check("save directory", "missing", f"{place} is not writable", "give another --save-dir")
    return Check(
        "save directory", "ok" if free >= 2 else "missing", f"{free:.1f} GiB free", "" if free >= 2 else "free some"
    )


def check_shared_memory() -> Check:
    """Ray's object store lives in /dev/shm."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Check("/dev/shm", "missing", "not there", "mount a tmpfs of at least 256 MiB (docker run --shm-size=1g)")
    free = shutil.disk_usage(shm).free / 1024**2
    good = free >= 256
    return Check(
        "/dev/shm", "ok" if good else "missing", f"{free:.0f} MiB free", "" if good else "docker run --shm-size=1g"
    )


def check_loopback() -> Check:
    """Services listen on loopback only."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        return Check("loopback", "ok", "127.0.0.1")
    except OSError as error:
        return Check("loopback", "missing", str(error), "bring up the lo interface: ip link set lo up")


def check_gpu(*, needed: bool) -> Check:
    """Cards, as the driver names them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        advice = "install the NVIDIA driver" if needed else ""
        return Check("GPU", "missing" if needed else "optional", "no nvidia-smi", advice)
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    names = answer.stdout.strip().splitlines()
    if answer.returncode != 0 or not names:
        return Check("GPU", "missing" if needed else "optional", answer.stderr.strip()[:80] or "none", "nvidia-smi")
    return Check("GPU", "ok", f"{len(names)} x {names[0]}")


def check_wandb() -> Check:
    """Without a key metrics are kept offline."""
    online = bool(os.environ.get("WANDB_API_KEY"))
    advice = "" if online else "set WANDB_API_KEY to upload; `wandb sync` uploads later"
    return Check("wandb", "ok" if online else "optional", "online" if online else "offline (no key)", advice)
