"""Server processes that come up, fail, hang or find their port taken; real processes, small commands."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from k31core.rollout.engines.sglang.client import SglangClient
from k31core.rollout.engines.sglang.launch import LaunchError, ServerProcess, reason_in_log, require_free_port

SERVES = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAILS = """
import sys
print("INFO loading weights")
print("Traceback (most recent call last):")
print('  File "model.py", line 3, in load')
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 46.00 GiB.")
print("INFO shutting down")
sys.exit(3)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def start(script: str, log: Path, timeout_s: float = 30.0) -> tuple[ServerProcess, float]:
    port = free_port()
    process = ServerProcess.start_command([sys.executable, "-c", script, str(port)], os.environ, log, what="engine 0")
    client = SglangClient(f"http://127.0.0.1:{port}", timeout_s=5, retries=0, max_concurrent=1)
    try:
        return process, await process.wait_healthy(client, timeout_s)
    except BaseException:
        await process.stop(grace_s=1)
        raise
    finally:
        await client.close()


def test_it_comes_up_and_stops_with_its_children(tmp_path: Path) -> None:
    async def main() -> None:
        process, seconds = await start(SERVES, tmp_path / "logs" / "a.log")
        assert 0 <= seconds < 30
        child = int((tmp_path / "logs" / "a.log").read_text().split()[1])
        assert psutil.pid_exists(child)
        await process.stop(grace_s=5)
        await process.stop(grace_s=5)
        assert process.exit_code is not None
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE

    asyncio.run(main())


def test_it_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from k31core.rollout.engines.sglang.launch import ServerProcess\n"
        "p = ServerProcess.start_command([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ,\n"
        "                                Path(sys.argv[1]), what='engine')\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path / "a.log")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait(30)
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone == [child]


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as error:
        asyncio.run(start(FAILS, tmp_path / "a.log"))
    text = str(error.value)
    assert text.startswith("engine 0 ended with exit code 3 after ")
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 46.00 GiB." in text
    assert f"(log: {tmp_path / 'a.log'})" in text


def test_a_server_that_never_answers_ends_at_the_deadline(tmp_path: Path) -> None:
    started = time.monotonic()
    script = "print('waiting for node 2', flush=True); import time; time.sleep(600)"
    with pytest.raises(LaunchError, match=r"did not answer within 1 s \(rollout\.engine\.startup_timeout_s\).*node 2"):
        asyncio.run(start(script, tmp_path / "a.log", timeout_s=1))
    assert time.monotonic() - started < 20


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"engine 0: cannot run /no/python \(rollout\.engine\.python\): No such file"):
        ServerProcess.start([], {}, tmp_path / "a.log", what="engine 0", python="/no/python")


def test_a_taken_port_names_its_owner() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} is taken.*set rollout\.engine\.port"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1:30000 \(rollout\.engine\.host\)"):
        require_free_port("192.0.2.1", 30000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "its log is empty"),
        ("one\ntwo\n\n", "two"),
        ("ValueError: bad rank\nINFO bye", "ValueError: bad rank"),
        ("RuntimeError: first\nNCCL WARN NET/IB: Got completion\nend", "NCCL WARN NET/IB: Got completion"),
    ],
)
def test_reason(text: str, reason: str) -> None:
    assert reason_in_log(text) == reason
