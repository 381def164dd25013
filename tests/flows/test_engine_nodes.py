"""One engine over three real Ray nodes: its server processes start on each, end with the run's teardown."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from k31core.cluster.actors import NAMESPACE, ClusterError, kill, names
from k31core.cluster.calls import wait_for
from k31core.cluster.engine_nodes import EngineRun, needs_node_workers, require_servers, start_engine_nodes
from k31core.recipe.load import load_recipe
from tests.flows.test_cluster_survey import add_nodes, start_head
from tests.unit.sglang.test_sglang_versions import K31_LORA, write_tree

pytestmark = [pytest.mark.flows, pytest.mark.timeout(600)]
SERVER = """
import http.server, json, sys, time
args = sys.argv[1:]
value = lambda name: args[args.index(name) + 1]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(args).encode())
if value("--node-rank") == "0":
    http.server.HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
time.sleep(600)
"""
DYING = """
import sys, time
if sys.argv[sys.argv.index("--node-rank") + 1] == "1":
    print("Loading weights", flush=True)
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12 GiB", flush=True)
    sys.exit(3)
time.sleep(600)
"""
LAYOUT = ["cluster.num_nodes=3", "train.parallel.pp=3", "rollout.engine.tp_size=24", "rollout.engine.ep_size=24"]


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[None]:
    small = {"num_cpus": 1, "num_gpus": 8, "object_store_memory": 80 * 1024**2, "include_log_monitor": False}
    cluster: Cluster = start_head({**small, "no_monitor": True})
    try:
        add_nodes(cluster, 2, small)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes(timeout=120)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_an_engine_over_three_nodes(three_nodes: None, tmp_path: Path) -> None:
    tree = Path(write_tree(tmp_path / "tree", "0.5.22.dev7", K31_LORA, lora=""))
    (tree / "sglang" / "__init__.py").write_text("")
    (tree / "sglang" / "launch_server.py").write_text(SERVER)
    recipe = load_recipe(
        "k31-32xh200", [*LAYOUT, f"rollout.engine.sglang_path={tree}", "cluster.bringup_timeout_s=120"]
    )
    assert needs_node_workers(recipe)
    prefix = f"{tmp_path}/run:"
    run = EngineRun(prefix, recipe.model_dump_json(), "/models/x", str(tmp_path / "run"), {})
    (url,) = start_engine_nodes(recipe, run)
    assert start_engine_nodes(recipe, run) == (url,)
    for _ in range(100):
        try:
            args = json.load(urllib.request.urlopen(url, timeout=5))
            break
        except OSError:
            time.sleep(0.2)
    assert args[args.index("--nnodes") + 1] == "3"
    assert args[args.index("--host") + 1] == url.removeprefix("http://").partition(":")[0]
    found = sorted(names(prefix))
    assert found == [f"{prefix}sglang-0-{rank}" for rank in range(3)]
    actors = [ray.get_actor(name, namespace=NAMESPACE) for name in found]
    pids = [reply["pid"] for reply in ray.get([actor.call.remote("start", []) for actor in actors])]
    assert len(set(pids)) == 3
    servers = [psutil.Process(pid) for pid in pids]
    for name in found:
        kill(name)
    gone, alive = psutil.wait_procs(servers, timeout=30)
    assert (len(gone), alive) == (3, [])


def test_a_server_that_dies_while_it_loads_ends_the_wait_at_once(three_nodes: None, tmp_path: Path) -> None:
    """Exit code and the end of its log are in the error; the deadline of an hour is not waited for."""

    class Waiting:  # local, so that it travels by value: an actor need not be able to import this file
        """In place of the rollout worker: it waits for a server that will never answer."""

        async def start(self) -> None:
            await asyncio.sleep(3600)

    tree = Path(write_tree(tmp_path / "tree", "0.5.22.dev7", K31_LORA, lora=""))
    (tree / "sglang" / "__init__.py").write_text("")
    (tree / "sglang" / "launch_server.py").write_text(DYING)
    recipe = load_recipe(
        "k31-32xh200",
        [*LAYOUT, f"rollout.engine.sglang_path={tree}", "cluster.bringup_timeout_s=120", "rollout.engine.port=31000"],
    )
    prefix = f"{tmp_path}/run:"
    run = EngineRun(prefix, recipe.model_dump_json(), "/models/x", str(tmp_path / "run"), {}, "one")
    start_engine_nodes(recipe, run)
    waiting = ray.remote(num_cpus=0)(Waiting).remote()
    begun = time.monotonic()
    with pytest.raises(ClusterError) as error:
        wait_for(["engine"], [waiting.start.remote()], "start", 3600.0, partial(require_servers, prefix))
    assert time.monotonic() - begun < 120
    text = str(error.value)
    assert "SGLang engine 0, node 1 on" in text
    assert "ended with exit code 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12 GiB" in text
    assert "sglang-0-node-1.log" in text
    again = start_engine_nodes(recipe, replace(run, fingerprint="two"))
    assert len(again) == 1, "actors of another environment are replaced"
    for name in names(prefix):
        kill(name)


def test_too_few_nodes(three_nodes: None, tmp_path: Path) -> None:
    recipe = load_recipe("k31-32xh200")
    run = EngineRun(f"{tmp_path}:", recipe.model_dump_json(), "/models/x", str(tmp_path), {})
    with pytest.raises(ClusterError, match=r"1 engines of 4 nodes with 8 GPUs each need 4 nodes, Ray has 3: "):
        start_engine_nodes(recipe, run)
