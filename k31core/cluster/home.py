"""Where the local services of this checkout live: `$K31_HOME`, or `.k31` in the working directory."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.cluster.processes import ProcessRecord
from k31core.observe.jsonl import write_atomic


@dataclass(frozen=True, slots=True)
class Home:
    """The home directory of services, prepared models and data, and result manifests."""

    root: Path

    @property
    def models(self) -> Path:
        """Checkpoints: `$K31_MODEL_DIR`, or `models/` here."""
        return Path(os.environ.get("K31_MODEL_DIR") or self.root / "models")

    @property
    def data(self) -> Path:
        """Data sets: `$K31_DATA_DIR`, or `data/` here."""
        return Path(os.environ.get("K31_DATA_DIR") or self.root / "data")

    @property
    def results(self) -> Path:
        """Prefect's task results: small JSON manifests."""
        return self.root / "results"

    @property
    def logs(self) -> Path:
        """Output of the services."""
        return self.root / "logs"

    @property
    def prefect(self) -> Path:
        """`PREFECT_HOME` of the local server: its database and profiles."""
        return self.root / "prefect"

    @property
    def ray_token(self) -> Path:
        """The secret that every Ray process of ours must know (readable by its owner only)."""
        return self.root / "ray-token"

    @property
    def ray_temp(self) -> Path:
        """Ray's session directory. Short: socket paths have at most 107 characters."""
        tag = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"k31-ray-{tag}"


@dataclass(frozen=True, slots=True)
class Services:
    """The local services that we started, as `services.json` remembers them."""

    prefect_url: str | None = None
    ray_address: str | None = None
    processes: tuple[tuple[str, ProcessRecord], ...] = ()
    """(service, process): `prefect`, `ray` or `worker`."""

    def of(self, service: str) -> list[ProcessRecord]:
        """Processes of one service."""
        return [record for name, record in self.processes if name == service]


def find_home() -> Home:
    """The home to use; made when missing."""
    root = Path(os.environ.get("K31_HOME") or Path.cwd() / ".k31").absolute()
    root.mkdir(parents=True, exist_ok=True)
    return Home(root)


def read_services(home: Home) -> Services:
    """What we started earlier; empty when nothing, or when the file is not readable."""
    path = home.root / "services.json"
    if not path.exists():
        return Services()
    record: dict[str, Any] = json.loads(path.read_bytes())
    processes = tuple((p["service"], ProcessRecord(p["pid"], p["started"])) for p in record["processes"])
    return Services(record["prefect_url"], record["ray_address"], processes)


def write_services(home: Home, services: Services) -> None:
    """Remember what we started."""
    processes = [{"service": name, **record.as_json()} for name, record in services.processes]
    record = {"prefect_url": services.prefect_url, "ray_address": services.ray_address, "processes": processes}
    write_atomic(home.root / "services.json", json.dumps(record, indent=1).encode())


def forget_services(home: Home) -> None:
    """Nothing runs any more."""
    (home.root / "services.json").unlink(missing_ok=True)
