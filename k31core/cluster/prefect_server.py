"""A real local Prefect server on loopback, started as a process of its own (Prefect itself is not imported here)."""

import importlib.util
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from k31core.cluster.home import Home
from k31core.cluster.processes import ProcessRecord, ServiceError, is_alive, record_of, start_detached, tail


def server_environment(home: Home) -> dict[str, str]:
    """Environment of the server process."""
    return {
        **os.environ,
        "PREFECT_HOME": str(home.prefect),
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # half of the machine for a server that mostly waits would be too much
        "OMP_NUM_THREADS": "1",
    }


def start_server(home: Home, port: int) -> ProcessRecord:
    """Start the server; it is not ready when this returns (see `is_healthy`)."""
    spec = importlib.util.find_spec("prefect")
    if spec is None or spec.origin is None:
        raise ServiceError("Prefect is not installed in this environment: run `uv sync`")
    command = [
        sys.executable, "-m", "uvicorn", "--app-dir", str(Path(spec.origin).parents[1]),
        "--factory", "prefect.server.api.server:create_app",
        "--host", "127.0.0.1", "--port", str(port), "--timeout-keep-alive", "5", "--log-level", "warning",
    ]  # fmt: skip
    home.prefect.mkdir(parents=True, exist_ok=True)
    # what notifications link to
    environment = {**server_environment(home), "PREFECT_UI_URL": f"http://127.0.0.1:{port}"}
    process = start_detached(command, server_log(home), environment)
    record = record_of(process.pid)
    if record is None:
        raise ServiceError(f"the Prefect server ended at once:\n{tail(server_log(home))}")
    return record


def server_log(home: Home) -> Path:
    """The server's output."""
    return home.logs / "prefect-server.log"


def api_url(port: int) -> str:
    """The URL that clients put into PREFECT_API_URL."""
    return f"http://127.0.0.1:{port}/api"


def is_healthy(url: str, *, timeout_s: float = 2.0) -> bool:
    """True when the server at `url` answers its health check."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def require_running(home: Home, record: ProcessRecord) -> None:
    """Raise ServiceError with the end of the log when the server process has died."""
    if not is_alive(record):
        raise ServiceError(
            f"the Prefect server did not come up; the end of {server_log(home)}:\n{tail(server_log(home))}\n"
            f"If its database is damaged, move {home.prefect} away and try again."
        )
