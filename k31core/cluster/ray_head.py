"""A local Ray head on loopback with token authentication. Ray is not imported here: its command line starts it."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from k31core.cluster.home import Home
from k31core.cluster.processes import ProcessRecord, ServiceError, free_port, processes_mentioning, start_detached, tail

OBJECT_STORE_BYTES = 128 * 1024**2
"""Manifests only travel through Ray; tensors go through files."""

UV_RUN_RUNTIME_ENV = "0"
"""Started by `uv run`, Ray would pack the working directory and start every worker through uv again, on any cluster."""


def use_token(home: Home, environment: MutableMapping[str, str]) -> None:
    """Set what every Ray process of ours needs; makes the secret when there is none."""
    if not home.ray_token.exists():
        descriptor = os.open(home.ray_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_AUTH_TOKEN_PATH"] = str(home.ray_token)
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    environment["RAY_DEDUP_LOGS"] = "0"
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = UV_RUN_RUNTIME_ENV


def start_head(home: Home, port: int, *, num_cpus: int, num_gpus: int) -> subprocess.Popen[bytes]:
    """Begin to start the head; returns `ray start`, which ends when the head is up or has failed."""
    ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or shutil.which("ray")
    if ray is None:
        raise ServiceError("Ray is not installed in this environment: run `uv sync`")
    environment = dict(os.environ)
    use_token(home, environment)
    environment["OMP_NUM_THREADS"] = "1"
    home.ray_temp.mkdir(mode=0o700, exist_ok=True)
    command = [
        ray, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--num-cpus={num_cpus}",
        f"--num-gpus={num_gpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=False",
        "--include-log-monitor=False", "--disable-usage-stats", f"--temp-dir={home.ray_temp}",
        f"--ray-client-server-port={free_port(10001)}", f"--dashboard-agent-listen-port={free_port(52365)}",
    ]  # fmt: skip
    return start_detached(command, head_log(home), environment)


def head_log(home: Home) -> Path:
    """Output of `ray start`."""
    return home.logs / "ray-head.log"


def head_processes(home: Home, address: str) -> list[ProcessRecord]:
    """The head's processes, found by our private session directory (or our address) in their command lines."""
    return processes_mentioning(str(home.ray_temp)) + processes_mentioning(f"--address={address}")


def is_listening(address: str, *, timeout_s: float = 1.0) -> bool:
    """True when something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False


def explain_failure(home: Home) -> ServiceError:
    """The error for a head that did not come up."""
    return ServiceError(
        f"Ray did not come up on 127.0.0.1; the end of {head_log(home)}:\n{tail(head_log(home))}\n"
        f"`k31 down` removes what is left of it; then try again, or set RAY_ADDRESS to a cluster of your own."
    )
