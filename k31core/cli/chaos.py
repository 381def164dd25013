"""Kill parts of a real run at random moments and bring it to its end: what `k31 verify-resume` and the tests use.

Between two kills the run must have committed at least one phase. The flow process is started again by its command
with --resume; trainer and engine are replaced by the flow itself; a killed Prefect server is started again here.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from k31core.cluster import prefect_server
from k31core.cluster.home import Home, read_services, write_services
from k31core.cluster.processes import ProcessRecord
from k31core.observe.jsonl import read_lines
from k31core.observe.metrics import is_volatile

TARGETS = ("flow", "engine", "trainer", "prefect")
PHASES = ("rollout", "train", "sync", "save", "eval")


class ChaosError(RuntimeError):
    """The run did not come to its end, or not to the same one: says where."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, for the record."""

    target: str
    step: int
    phase: str
    """The last phase in the ledger when the target was killed."""


class Chaos:
    """Runs one run directory to its end while killing its parts."""

    def __init__(
        self, root: Path, home: Home, *, seed: int, targets: Sequence[str] = TARGETS, entry: str = "k31core.cli.main"
    ) -> None:
        """`root` is the run directory (it need not exist yet); `home` names the local services.

        `entry` is the module that is run as the `k31` command.
        """
        self.root, self.home, self.targets, self.entry = root, home, tuple(targets), entry
        self.random = random.Random(seed)
        self.kills: list[Kill] = []
        self.log = root.parent / f"{root.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        arguments: Sequence[str],
        *,
        kills: int,
        timeout_s: float,
        say: Callable[[str], None],
        over_steps: int | None = None,
    ) -> list[Kill]:
        """Start `k31 train` with `arguments` and kill until `kills` are done; returns what was killed.

        over_steps: the run's steps, to spread the kills over all of them; None kills as early as it may. Raises
        ChaosError when the run fails by itself, stands still, or takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        plan = self._plan(kills, over_steps)
        self._start(["train", "--run-id", self.root.name, "--save-dir", str(self.root.parent), *arguments])
        try:
            seen = self._committed()
            while len(self.kills) < kills and not self._ended():
                step, more = plan[len(self.kills)]
                if not self._wait_for_step(step, deadline) or not self._wait_for_commit(seen + more, deadline):
                    break
                time.sleep(self.random.uniform(0.0, 1.5))
                if self._strike(say):
                    seen = self._committed()
            self._wait_for_end(deadline)
        finally:
            self._stop()
        return self.kills

    def _plan(self, kills: int, over_steps: int | None) -> list[tuple[int, int]]:
        """(step that must have been trained, phases to let pass) of every kill: random, in the order of the steps."""
        if over_steps is None:
            return [(0, 0)] * kills
        return [
            (step, self.random.randrange(4))
            for step in sorted(self.random.choices(range(max(1, over_steps - 1)), k=kills))
        ]

    def _start(self, command: Sequence[str]) -> None:
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.entry, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "K31_HOME": str(self.home.root)},
                start_new_session=True,
            )

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ledger(self) -> list[dict[str, Any]]:
        return read_lines(self.root / "ledger.jsonl")[0]

    def _committed(self) -> int:
        return sum(record["phase"] in PHASES for record in self._ledger())

    def _ended(self) -> bool:
        return any(record["phase"] == "report" for record in self._ledger())

    def _restart_if_gone(self) -> None:
        """Start the run again, as a person or an automation would, when its process has ended before the run has."""
        assert self._process is not None
        if self._process.poll() is None or self._ended():
            return
        starts = sum(record["phase"] == "attempt" for record in self._ledger())
        if starts > 4 * (len(self.kills) + 2):
            raise ChaosError(f"{self.root} does not get on after {starts} starts; see {self.log}")
        command = ["train", "--resume"] if starts % 2 else ["resume"]  # the two that a person may type
        self._start([*command, self.root.name, "--save-dir", str(self.root.parent)])

    def _wait_for_step(self, step: int, deadline: float) -> bool:
        """Wait until the run has ever trained `step`; False when it ended first."""
        while max((r["step"] for r in self._ledger() if r["phase"] == "train"), default=0) < step:
            if self._ended():
                return False
            self._pause(deadline)
        return not self._ended()

    def _wait_for_commit(self, seen: int, deadline: float) -> bool:
        """Wait until more phases are committed than `seen`; False when the run ended first."""
        while self._committed() <= seen:
            if self._ended():
                return False
            self._pause(deadline)
        return not self._ended()

    def _wait_for_end(self, deadline: float) -> None:
        assert self._process is not None
        while not (self._ended() and self._process.poll() is not None):
            self._pause(deadline)
        if self._process.returncode not in (0, -signal.SIGKILL):
            raise ChaosError(f"{self.root} ended with exit code {self._process.returncode}; see {self.log}")

    def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise ChaosError(f"{self.root} has not ended in time; see {self.log}")
        self._restart_if_gone()
        time.sleep(0.05)

    def _strike(self, say: Callable[[str], None]) -> bool:
        """Kill one target with SIGKILL; False when it was not there just then."""
        target = self.random.choice(self.targets)
        pid = self._pid(target)
        if pid is None or self._ended():
            return False
        last = self._ledger()[-1]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills.append(Kill(target, last["step"], last["phase"]))
        say(f"kill {len(self.kills)}: {target} after {last['phase']} of step {last['step']}")
        if target == "prefect":
            restart_prefect(self.home)
        return True

    def _pid(self, target: str) -> int | None:
        if target == "prefect":
            records = read_services(self.home).of("prefect")
            return records[-1].pid if records and psutil.pid_exists(records[-1].pid) else None
        if target == "flow":
            return self._process.pid if self._process and self._process.poll() is None else None
        path = self.root / "workers.json"
        if not path.exists():
            return None
        workers: dict[str, int] = json.loads(path.read_bytes())
        names = [name for name in workers if name.startswith(target)]
        pid = workers[self.random.choice(names)]
        return pid if psutil.pid_exists(pid) and psutil.Process(pid).name().startswith("ray::") else None


def restart_prefect(home: Home) -> None:
    """Start the local Prefect server again on its old port and wait until it answers."""
    services = read_services(home)
    assert services.prefect_url is not None
    port = int(services.prefect_url.split(":")[2].split("/")[0])
    record: ProcessRecord = prefect_server.start_server(home, port)
    others = tuple(entry for entry in services.processes if entry[0] != "prefect")
    write_services(home, replace(services, processes=(*others, ("prefect", record))))
    deadline = time.monotonic() + 120
    while not prefect_server.is_healthy(services.prefect_url):
        if time.monotonic() > deadline:
            raise ChaosError("the Prefect server did not come back")
        time.sleep(0.2)


def differences(one: Path, other: Path) -> list[str]:
    """How two runs of the same recipe differ: bytes of the last save, metrics (apart from times and memory), prompts.

    Empty when they are the same run.
    """
    found = []
    saves = [sorted((root / "adapters").glob("step-?????"))[-1] for root in (one, other)]
    if saves[0].name != saves[1].name:
        return [f"the last save is {saves[0].name} in {one.name}, {saves[1].name} in {other.name}"]
    files = [{p.relative_to(s).as_posix(): p for p in s.rglob("*") if p.is_file()} for s in saves]
    for name in sorted(files[0].keys() | files[1].keys()):
        if name == "manifest.json":  # holds the run's name
            continue
        if name not in files[0] or name not in files[1]:
            found.append(f"{saves[0].name}/{name} is in one run only")
        elif files[0][name].read_bytes() != files[1][name].read_bytes():
            found.append(f"{saves[0].name}/{name} has other bytes")
    found += _different_rows("metrics.jsonl", *(_rows(root / "metrics.jsonl") for root in (one, other)))
    return found + _different_rows("prompts.jsonl", *(_rows(root / "prompts.jsonl") for root in (one, other)))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not is_volatile(k)} for row in read_lines(path)[0]]


def _different_rows(name: str, one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    if len(one) != len(other):
        return [f"{name} has {len(one)} lines in one run, {len(other)} in the other"]
    found = []
    for a, b in zip(one, other):
        for key in sorted(a.keys() | b.keys()):
            if json.dumps(a.get(key)) != json.dumps(b.get(key)):
                found.append(f"{name} step {a.get('step')}: {key} is {a.get(key)} and {b.get(key)}")
    return found
