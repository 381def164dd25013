"""Bring up what a run needs (Prefect server and Ray, in parallel) and take it down again."""

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from k31core.cluster import prefect_server, ray_head
from k31core.cluster.home import Home, Services, forget_services, read_services, write_services
from k31core.cluster.processes import ProcessRecord, ServiceError, free_port, is_alive, require_free_port, stop


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What the user asked for; None ports are chosen."""

    prefect_port: int | None = None
    ray_port: int | None = None
    num_cpus: int = 2
    num_gpus: int = 0
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the services answer."""

    prefect_url: str
    ray_address: str
    started: tuple[str, ...]
    """Services that this call started: `prefect`, `ray`."""


RAY_GRACE_S = 4.0
"""Ray's head does not always end when asked while workers live; nothing in it needs saving."""

Progress = Callable[[str], None]


def connect_environment(home: Home, endpoints: Endpoints) -> None:
    """Point this process (and its children) at the services; call it before Prefect or Ray is imported."""
    os.environ["PREFECT_API_URL"] = endpoints.prefect_url
    os.environ.setdefault("PREFECT_HOME", str(home.prefect))
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_ENABLED", "false")
    os.environ["RAY_ADDRESS"] = endpoints.ray_address
    os.environ["K31_HOME"] = str(home.root)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = ray_head.UV_RUN_RUNTIME_ENV
    if endpoints.ray_address.startswith("127."):
        ray_head.use_token(home, os.environ)


class Bringup:
    """Services that are being started. The endpoints are known at once, so the caller can import Prefect meanwhile."""

    def __init__(self, home: Home, options: ServiceOptions) -> None:
        """Use what runs and begin to start what does not; `wait` must follow."""
        self._home, self._options = home, options
        self._deadline = time.monotonic() + options.timeout_s
        self._server: ProcessRecord | None = None
        self._starter: subprocess.Popen[bytes] | None = None
        # one bring-up at a time for this user, whatever the home: two would choose the same free port, and two commands
        # of one home would start everything twice
        self._lock = (Path(tempfile.gettempdir()) / f"k31-bringup-{os.getuid()}.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self.endpoints = self._begin()
        except BaseException:
            self._lock.close()
            raise

    def _begin(self) -> Endpoints:
        home, options = self._home, self._options
        services = _forget_dead(home)
        prefect_url = os.environ.get("PREFECT_API_URL") or services.prefect_url
        ray_address = os.environ.get("RAY_ADDRESS") or services.ray_address
        _require_alive(services, prefect_url, ray_address)
        started = tuple(n for n, there in (("prefect", prefect_url), ("ray", ray_address)) if there is None)
        if prefect_url is None:
            port = _port(options.prefect_port, 4200, "the Prefect server", "--prefect-port")
            self._server = prefect_server.start_server(home, port)
            prefect_url = prefect_server.api_url(port)
            _remember(home, replace(services, prefect_url=prefect_url), "prefect", [self._server])
        if ray_address is None:
            port = _port(options.ray_port, 6380, "Ray", "--ray-port")
            ray_address = f"127.0.0.1:{port}"
            self._starter = ray_head.start_head(home, port, num_cpus=options.num_cpus, num_gpus=options.num_gpus)
        return Endpoints(prefect_url, ray_address, started)

    def wait(self, progress: Progress) -> Endpoints:
        """Wait until both answer. Raises ServiceError naming the service, with the end of its log."""
        home, address = self._home, self.endpoints.ray_address
        try:
            if self._starter is not None:
                progress("starting Ray")
                _wait_for_ray(home, self._starter, address, self._deadline)
                services = replace(read_services(home), ray_address=address)
                _remember(home, services, "ray", ray_head.head_processes(home, address))
            if self._server is not None:
                progress("starting the Prefect server")
                _wait_for_prefect(home, self._server, self.endpoints.prefect_url, self._deadline)
        finally:
            self._lock.close()
        return self.endpoints


def ensure_services(home: Home, options: ServiceOptions, progress: Progress) -> Endpoints:
    """Use what runs, start what does not, wait until both answer. `progress` gets a word on every change.

    A server named by PREFECT_API_URL or a cluster named by RAY_ADDRESS is used as it is and never started or
    stopped. Raises ServiceError naming the service, with the end of its log.
    """
    return Bringup(home, options).wait(progress)


def stop_services(home: Home) -> dict[str, int]:
    """Stop what we started, children first to last; returns how many processes each service had."""
    services = read_services(home)
    counts = {}
    for name in ("worker", "ray", "prefect"):
        records = services.of(name)
        if name == "ray":
            known = {record.pid for record in records}
            address = services.ray_address or "127.0.0.1:none"
            records = records + [r for r in ray_head.head_processes(home, address) if r.pid not in known]
        counts[name] = stop(records, grace_s=RAY_GRACE_S if name == "ray" else 10.0)
    forget_services(home)
    return counts


def add_process(home: Home, service: str, record: ProcessRecord) -> None:
    """Remember one more process, so that `k31 down` stops it."""
    _remember(home, read_services(home), service, [record])


def _remember(home: Home, services: Services, name: str, records: list[ProcessRecord]) -> Services:
    services = replace(services, processes=services.processes + tuple((name, record) for record in records))
    write_services(home, services)
    return services


def _forget_dead(home: Home) -> Services:
    """Drop services whose processes are gone; a Ray head of which a part is missing is taken down whole."""
    services = read_services(home)
    if services.of("prefect") and not all(map(is_alive, services.of("prefect"))):
        services = replace(services, prefect_url=None, processes=_without(services, "prefect"))
    ray = services.of("ray")
    if ray and not (all(map(is_alive, ray)) and ray_head.is_listening(services.ray_address or "")):
        stop(ray)
        services = replace(services, ray_address=None, processes=_without(services, "ray"))
    services = replace(services, processes=tuple(p for p in services.processes if is_alive(p[1])))
    write_services(home, services)
    return services


def _without(services: Services, name: str) -> tuple[tuple[str, ProcessRecord], ...]:
    return tuple(p for p in services.processes if p[0] != name)


def _require_alive(services: Services, prefect_url: str | None, ray_address: str | None) -> None:
    if prefect_url is not None and not prefect_server.is_healthy(prefect_url, timeout_s=10):
        hint = (
            "`k31 down` and try again" if prefect_url == services.prefect_url else "start it, or unset PREFECT_API_URL"
        )
        raise ServiceError(f"the Prefect server at {prefect_url} does not answer its health check: {hint}")
    if ray_address is not None and ":" in ray_address and not ray_head.is_listening(ray_address.split("//")[-1]):
        raise ServiceError(f"no Ray head answers at {ray_address}: start it, or unset RAY_ADDRESS")


def _port(asked: int | None, preferred: int, what: str, option: str) -> int:
    if asked is None:
        return free_port(preferred)
    require_free_port(asked, what, option)
    return asked


def _wait_for_ray(home: Home, starter: subprocess.Popen[bytes], address: str, deadline: float) -> None:
    try:
        code = starter.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        starter.kill()
        stop(ray_head.head_processes(home, address), grace_s=RAY_GRACE_S)
        raise ray_head.explain_failure(home) from error
    if code != 0:
        stop(ray_head.head_processes(home, address), grace_s=RAY_GRACE_S)
        raise ray_head.explain_failure(home)


def _wait_for_prefect(home: Home, server: ProcessRecord, url: str, deadline: float) -> None:
    while not prefect_server.is_healthy(url):
        prefect_server.require_running(home, server)
        if time.monotonic() > deadline:
            stop([server])
            raise ServiceError(
                f"the Prefect server at {url} did not answer in time; see {prefect_server.server_log(home)}"
            )
        time.sleep(0.2)
