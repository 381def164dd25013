"""The per-node worker with a real process: an SGLang tree made for the test, whose server is a few lines."""

import asyncio
import json
import socket
import urllib.request
from pathlib import Path

import pytest

from k31core.recipe.load import load_recipe
from k31core.rollout.engine import EngineError
from k31core.rollout.engines.sglang.versions import SglangVersionError
from k31core.workers.sglang_node import SglangNodeWorker
from tests.unit.sglang.test_sglang_versions import K3, K31_LORA, write_tree

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        import os
        self.wfile.write(json.dumps({"args": sys.argv[1:], "ras": os.environ["NCCL_RAS_ENABLE"]}).encode())
    def log_message(self, *a): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def worker(tmp_path: Path, models: str, node_rank: int = 0) -> SglangNodeWorker:
    tree = Path(write_tree(tmp_path / "tree", "0.5.22.dev7", models, lora=""))
    (tree / "sglang" / "__init__.py").write_text("")
    (tree / "sglang" / "launch_server.py").write_text(SERVER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe = load_recipe("k31-32xh200", [f"rollout.engine.sglang_path={tree}", f"rollout.engine.port={port}"])
    return SglangNodeWorker(recipe.model_dump_json(), "/models/x", str(tmp_path / "run"), 0, node_rank, "127.0.0.1")


def test_it_starts_with_the_recipes_command_line_and_stops(tmp_path: Path) -> None:
    async def main() -> None:
        node = worker(tmp_path, K31_LORA)
        assert (await node.state())["reason"] == "not started"
        started = await node.start()
        assert (await node.start())["pid"] == started["pid"]
        for _ in range(100):
            try:
                seen = json.load(await asyncio.to_thread(urllib.request.urlopen, started["url"], timeout=5))
                break
            except OSError:
                await asyncio.sleep(0.1)
        assert seen["ras"] == "0"
        args = seen["args"]
        assert args[args.index("--node-rank") + 1] == "0"
        assert args[args.index("--nnodes") + 1] == "4"
        assert args[args.index("--attn-dp-size") + 1] == "4"
        assert (await node.state())["running"]
        with pytest.raises(EngineError, match="is taken"):
            other = SglangNodeWorker(node._recipe.model_dump_json(), "/m", str(tmp_path / "b"), 0, 0, "127.0.0.1")
            await other.start()
        await node.stop()
        await node.stop()
        assert not (await node.state())["running"]

    asyncio.run(main())


def test_a_tree_that_cannot_serve_the_recipe_is_refused_before_the_start(tmp_path: Path) -> None:
    node = worker(tmp_path, K3)
    with pytest.raises(SglangVersionError, match=r"no Kimi-K3\.1 model"):
        asyncio.run(node.start())
    assert not (tmp_path / "run").exists()
