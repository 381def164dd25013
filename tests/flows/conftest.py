"""One Prefect server and one Ray head for all flow tests, in a home of their own."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k31core.cluster import ray_head
from k31core.cluster.home import Home
from k31core.cluster.services import Endpoints, ServiceOptions, ensure_services, stop_services

ROOT = Path(__file__).parents[2]
SMALL = ["observe.wandb=false", "save.interval=3", "cluster.cpus_per_trainer=0.5", "cluster.cpus_per_engine=0.5"]


@dataclass
class Lab:
    """The services, and small helpers to run flows against them."""

    home: Home
    endpoints: Endpoints
    runs: Path

    @property
    def environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            "K31_HOME": str(self.home.root),
            "PREFECT_API_URL": self.endpoints.prefect_url,
            "PREFECT_HOME": str(self.home.prefect),
            "RAY_ADDRESS": self.endpoints.ray_address,
            "PREFECT_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
        }
        ray_head.use_token(self.home, environment)
        return environment

    def parameters(
        self, run_id: str, *, steps: int = 7, overrides: tuple[str, ...] = (), **more: Any
    ) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "save_dir": str(self.runs),
            "num_rollout": steps,
            "overrides": [*SMALL, *overrides],
            **more,
        }

    def command(self, *parameters: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", "tests.flows.fakes.run_flow", *map(json.dumps, parameters)]

    def run(self, *parameters: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
        """Run flows one after the other in one process; returns their final states."""
        done = subprocess.run(
            self.command(*parameters),
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        states = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("STATE ")]
        assert len(states) == len(parameters), done.stdout[-3000:] + done.stderr[-3000:]
        return states

    def start(self, *parameters: dict[str, Any], **environment: str) -> subprocess.Popen[bytes]:
        log = (self.runs / f"{parameters[0]['run_id']}.log").open("wb")
        return subprocess.Popen(
            self.command(*parameters), cwd=ROOT, env={**self.environment, **environment}, stdout=log, stderr=log
        )

    def ledger(self, run_id: str) -> list[dict[str, Any]]:
        path = self.runs / run_id / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []

    def wait_for(self, run_id: str, phase: str, step: int, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(r["phase"] == phase and r["step"] == step for r in self.ledger(run_id)):
            assert time.monotonic() < deadline, f"{run_id} never reached {phase} {step}: {self.ledger(run_id)[-3:]}"
            time.sleep(0.05)

    def fault(self, run_id: str, method: str, text: str) -> None:
        (self.runs / f"{run_id}.fault-{method}").write_text(text)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """One call of the Prefect API."""
        request = urllib.request.Request(
            f"{self.endpoints.prefect_url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or b"null")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.endpoints.prefect_url}{path}", timeout=30) as reply:
            return json.loads(reply.read())


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Services that end with the session."""
    home = Home(tmp_path_factory.mktemp("home"))
    saved = {name: os.environ.pop(name, None) for name in ("PREFECT_API_URL", "RAY_ADDRESS", "K31_HOME")}
    try:
        endpoints = ensure_services(home, ServiceOptions(num_cpus=4), lambda text: None)
        lab = Lab(home, endpoints, tmp_path_factory.mktemp("runs"))
        script = "from tasks.storage import save_results_block; import sys, pathlib; "
        script += "save_results_block(pathlib.Path(sys.argv[1]))"
        subprocess.run(
            [sys.executable, "-c", script, str(home.results)], cwd=ROOT, env=lab.environment, check=True, timeout=120
        )
        yield lab
    finally:
        os.environ.update({name: value for name, value in saved.items() if value is not None})
        stop_services(home)
