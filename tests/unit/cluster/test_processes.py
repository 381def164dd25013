"""Processes we start and stop, ports, and what `services.json` remembers."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from k31core.cluster.home import Home, Services, read_services, write_services
from k31core.cluster.processes import (
    ProcessRecord,
    ServiceError,
    free_port,
    is_alive,
    processes_mentioning,
    record_of,
    require_free_port,
    start_detached,
    stop,
)
from k31core.cluster.services import Bringup, ServiceOptions, ensure_services, stop_services

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
time.sleep(60)
"""


def test_a_process_is_stopped_with_its_children(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    process = start_detached([sys.executable, "-c", PARENT, marker], tmp_path / "log", os.environ)
    deadline = time.monotonic() + 20
    while len(found := processes_mentioning(marker)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record = record_of(process.pid)
    assert record is not None and is_alive(record)
    assert stop([record], grace_s=5) == 2
    assert not any(map(is_alive, found)) and not is_alive(record)
    assert stop([record]) == 0


def test_another_process_with_the_same_number_is_left_alone() -> None:
    stranger = ProcessRecord(os.getpid(), started=1.0)
    assert not is_alive(stranger)
    assert stop([stranger]) == 0  # this test would not survive otherwise


def test_a_port_in_use_is_named_with_the_option() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ServiceError, match=rf"port {port} for Ray is in use .* --ray-port"):
            require_free_port(port, "Ray", "--ray-port")
        assert free_port(port) != port


def test_a_port_in_use_stops_the_bring_up_before_anything_starts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    home = Home(tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ServiceError, match="--prefect-port"):
            Bringup(home, ServiceOptions(prefect_port=listener.getsockname()[1]))
    assert read_services(home) == Services()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PREFECT_API_URL", "http://127.0.0.1:9/api", "does not answer its health check"),
        ("RAY_ADDRESS", "127.0.0.1:9", "no Ray head answers at 127.0.0.1:9"),
    ],
)
def test_a_service_named_by_the_user_that_is_down_is_an_error(tmp_path: Path, monkeypatch, name, value, words) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ServiceError, match=words):
        ensure_services(Home(tmp_path), ServiceOptions(), lambda text: None)
    assert stop_services(Home(tmp_path)) == {"worker": 0, "ray": 0, "prefect": 0}


def test_services_are_remembered(tmp_path: Path) -> None:
    home = Home(tmp_path)
    services = Services("http://x/api", "127.0.0.1:1", (("ray", ProcessRecord(1, 2.0)),))
    write_services(home, services)
    assert read_services(home) == services and services.of("ray") == [ProcessRecord(1, 2.0)]
    assert len(str(home.ray_temp)) < 60, "Ray's socket paths are limited to 107 characters"
