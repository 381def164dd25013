"""The routes.

python -m tests.sglang_standin.server --model-path DIR --port N --max-lora-rank R [SGLang's other options, ignored]
"""

import argparse
import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from k31core.model.build import LORA_TARGETS, LoraSpec
from k31core.model.weight_names import base_slots
from k31core.rollout.engine import AdapterRefusedError, EngineError
from k31core.rollout.engines.embedded.core import Limits
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from tests.sglang_standin.adapter import to_logical, write_logical
from tests.sglang_standin.handles import differing, open_payload
from tests.sglang_standin.wire import answer_of, request_of, unknown_fields

VERSION = "0.5.22.dev7+gstandin"
"""Not a plain release: our client takes a branch at its word."""


class Standin:
    """One engine and what SGLang knows about it."""

    def __init__(
        self, engine: EmbeddedEngine, lora: LoraSpec, *, nested: bool = False, keeps_base: bool = True
    ) -> None:
        """keeps_base: `--enable-weights-cpu-backup`; without it the weights are gone once they were released."""
        self.engine, self.lora, self.nested, self.keeps_base = engine, lora, nested, keeps_base
        self.weight_version = "default"
        self.loaded: str | None = None
        self.requests: list[dict[str, Any]] = []
        """Every /generate body, for tests."""
        self.released: set[str] = set()
        self.session: set[str] | None = None
        """Names of the weights that came since /begin_weight_update."""
        self._loads = -1

    async def generate(self, body: dict[str, Any]) -> Response:
        self.requests.append(body)
        if body.get("lora_path") != self.loaded:
            return error(400, f"LoRA adapter {body.get('lora_path')!r} is not loaded (loaded: {self.loaded!r})")
        if self.released:
            return error(500, f"memory is released: {sorted(self.released)}")
        request = request_of(body, self._loads)
        try:
            scores = await self.engine.score(request.tokens) if body.get("logprob_start_len") == 0 else None
            completion = await self.engine.generate(request)
        except ValueError as problem:
            return error(400, str(problem))
        except EngineError as problem:
            return error(500, str(problem))
        flat = bool(body.get("return_flat_raw_output_top_logprobs")) and not self.nested
        answer = answer_of(completion, request, weight_version=self.weight_version, scores=scores, flat=flat)
        return Response(orjson.dumps(answer), media_type="application/json")

    async def load(self, body: dict[str, Any]) -> Response:
        def write(target: Path) -> None:
            to_logical(Path(body["lora_path"]), target, self.lora)

        return await self._load(body, write)

    async def load_tensors(self, body: dict[str, Any]) -> Response:
        def write(target: Path) -> None:
            (text,) = body["serialized_named_tensors"]
            if body["load_format"] != "flattened_bucket":
                raise ValueError(f"load_format {body['load_format']}")
            tensors = open_payload(text)
            wrong = differing(tensors, body["expected_checksums"]) if body.get("expected_checksums") else []
            if wrong:
                raise ValueError(f"[LORA-CHECK] adapter sync MISMATCH: {wrong[:5]}")
            write_logical(tensors, body["config_dict"], target, self.lora)

        return await self._load(body, write)

    async def _load(self, body: dict[str, Any], write: Callable[[Path], None]) -> Response:
        if self.loaded is not None:
            return update(400, f"an adapter is loaded already: {self.loaded}")
        with tempfile.TemporaryDirectory() as folder:
            try:
                logical = Path(folder) / "logical"
                write(logical)
                await self.engine.load_adapter(logical, self._loads + 1)
            except (AdapterRefusedError, ValueError, OSError) as problem:
                return update(400, str(problem))
        self._loads += 1
        self.loaded = body["lora_name"]
        return update(200, None)

    async def unload(self, body: dict[str, Any]) -> Response:
        if body["lora_name"] != self.loaded:
            return update(400, f"LoRA adapter {body['lora_name']!r} is not loaded")
        self.loaded = None
        return update(200, None)

    async def rename(self, body: dict[str, Any]) -> Response:
        self.weight_version = body["new_version"]
        return update(200, None)

    async def begin_weights(self, body: dict[str, Any]) -> Response:
        if "weights" in self.released:
            return update(400, "the weights' memory is released")
        self.session = set()
        return update(200, None)

    async def update_weights(self, body: dict[str, Any]) -> Response:
        if self.session is None:
            return update(400, "no weight-update session is open")
        own = self._base()
        (text,) = body["serialized_named_tensors"]
        for name, tensor in open_payload(text).items():
            target = own[name].tensor.detach()  # an unknown name is an error here; SGLang skips it silently
            target.copy_(tensor[: target.shape[0]])
            self.session.add(name)
        return update(200, None)

    async def end_weights(self, body: dict[str, Any]) -> Response:
        missing = sorted(self._base().keys() - (self.session or set()))
        self.session = None
        return update(400, f"{len(missing)} weights did not come, first {missing[0]}") if missing else update(200, None)

    def _base(self) -> dict[str, Any]:
        decoder = self.engine._decoder
        assert decoder is not None
        return {slot.name: slot for slot in base_slots(decoder)}

    async def abort(self, body: dict[str, Any]) -> Response:
        await self.engine.abort((body["rid"],))
        return Response(status_code=200)

    async def release(self, body: dict[str, Any]) -> Response:
        if (await self.engine.health()).running:
            return error(400, "requests are running")
        self.released |= set(body["tags"])
        await self.engine.sleep()
        if "weights" in body["tags"] and not self.keeps_base:
            for slot in self._base().values():
                slot.tensor.detach().zero_()
        return Response(status_code=200)

    async def resume(self, body: dict[str, Any]) -> Response:
        self.released -= set(body["tags"])
        if not self.released:
            await self.engine.wake()
        return Response(status_code=200)

    async def flush(self) -> Response:
        busy = (await self.engine.health()).running
        return error(400, "requests are running") if busy else Response("Cache flushed.", status_code=200)

    def info(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "enable_lora": True,
            "max_lora_rank": self.lora.rank,
            "enable_return_routed_experts": True,
            "experts_shared_outer_loras": True,
            "internal_states": [{}],
        }


def error(status: int, message: str) -> Response:
    return Response(orjson.dumps({"error": {"message": message}}), status_code=status, media_type="application/json")


def update(status: int, message: str | None) -> Response:
    tree = {"success": message is None, "error_message": message}
    return Response(orjson.dumps(tree), status_code=status, media_type="application/json")


def build_app(standin: Standin) -> FastAPI:
    """All routes our client uses."""
    app = FastAPI()
    posts = {
        "/generate": (standin.generate, "GenerateReqInput"),
        "/load_lora_adapter": (standin.load, "LoadLoRAAdapterReqInput"),
        "/load_lora_adapter_from_tensors": (standin.load_tensors, "LoadLoRAAdapterFromTensorsReqInput"),
        "/unload_lora_adapter": (standin.unload, "UnloadLoRAAdapterReqInput"),
        "/release_memory_occupation": (standin.release, "ReleaseMemoryOccupationReqInput"),
        "/resume_memory_occupation": (standin.resume, "ResumeMemoryOccupationReqInput"),
        "/update_weight_version": (standin.rename, "UpdateWeightVersionReqInput"),
        "/update_weights_from_tensor": (standin.update_weights, "UpdateWeightsFromTensorReqInput"),
        "/begin_weight_update": (standin.begin_weights, "BeginWeightUpdateReqInput"),
        "/end_weight_update": (standin.end_weights, "EndWeightUpdateReqInput"),
        "/abort_request": (standin.abort, "AbortReq"),
    }
    for path, (handler, kind) in posts.items():
        app.add_api_route(path, _post(handler, kind), methods=["POST"])

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if (await standin.engine.health()).alive else 503)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return standin.info()

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {"model_path": "standin", "weight_version": standin.weight_version}

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        return await standin.flush()

    return app


def _post(handler: Any, kind: str) -> Any:
    async def route(request: Request) -> Response:
        body = orjson.loads(await request.body())
        unknown = unknown_fields(kind, body)
        response: Response = error(400, f"unknown fields {unknown}") if unknown else await handler(body)
        return response

    return route


@asynccontextmanager
async def serving(standin: Standin, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback inside this event loop; yields the URL."""
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(build_app(standin), log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        listener.close()


async def main(arguments: argparse.Namespace) -> None:
    targets = os.environ.get("K31_STANDIN_TARGETS")
    lora = LoraSpec(
        arguments.max_lora_rank, arguments.lora_alpha, tuple(targets.split(",")) if targets else LORA_TARGETS
    )
    limits = Limits(64, arguments.max_total_tokens, 2048)
    engine = await EmbeddedEngine.open(Path(arguments.model_path), EmbeddedOptions(limits, lora))
    try:
        standin = Standin(engine, lora, keeps_base=arguments.enable_weights_cpu_backup)
        async with serving(standin, arguments.port) as url:
            print(f"serving {url}", flush=True)
            await asyncio.Event().wait()
    finally:
        await engine.close()


def command_line() -> None:
    """As `python -m sglang.launch_server` is started; the scale of the adapter, which SGLang reads from every adapter,
    comes from the environment where it is not an argument."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    parser.add_argument("--max-total-tokens", type=int, default=16384)
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    parser.add_argument("--lora-alpha", type=float, default=float(os.environ.get("K31_STANDIN_ALPHA", "0")))
    asyncio.run(main(parser.parse_known_args()[0]))


if __name__ == "__main__":
    command_line()
