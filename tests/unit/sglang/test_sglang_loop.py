"""The loop with the engine behind HTTP, in a process of its own: rollout, train, sync, rollout with what was learnt."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.recipe.load import load_recipe
from k31core.rollout.engines.sglang.client import SglangClient
from k31core.rollout.engines.sglang.launch import ServerProcess
from k31core.rollout.records import read_groups
from k31core.workers.rollout import RolloutWorker
from k31core.workers.train import TrainWorker
from tests.loop_inputs import OVERRIDES, write_loop_inputs

CANARY = [3, 11, 12, 25, 13, 30]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model directory, data directory) of a random 4-layer model with the tiny tokenizer and sums."""
    return write_loop_inputs(tmp_path_factory.mktemp("loop"))


def recipe_text(url: str) -> str:
    return load_recipe(
        "tiny",
        [
            "rollout.engine.kind=sglang",
            f"rollout.engine.server_urls=['{url}']",
            *OVERRIDES,
            "cluster.colocate=false",
        ],
    ).model_dump_json()


def test_three_steps_over_http(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = prepared
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "tests.sglang_standin.server", "--model-path", str(model), "--port", port,
               "--max-lora-rank", "4", "--lora-alpha", "8", "--tp-size", "1"]  # fmt: skip

    async def main() -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        server = ServerProcess.start_command(command, environment, tmp_path / "logs" / "server.log", what="stand-in")
        try:
            client = SglangClient(url, timeout_s=60, retries=0, max_concurrent=1)
            await server.wait_healthy(client, 120)
            await client.close()
            await loop(url)
        finally:
            await server.stop(grace_s=5)

    async def loop(url: str) -> None:
        rollout_worker = RolloutWorker(recipe_text(url), str(tmp_path), str(model), str(data))
        trainer = TrainWorker(recipe_text(url), str(tmp_path), str(model), 0, 1, "")
        await rollout_worker.start()
        trainer.start()
        trainer.restore(None)
        cursor, means = None, []
        for step in range(1, 4):
            out = tmp_path / f"adapter-{step - 1}"
            out.mkdir()
            trainer.export(step - 1, str(out), False)
            rollout = await rollout_worker.run(step, cursor, step - 1, str(out))
            cursor = rollout["cursor"]
            difference = np.abs(np.subtract(await rollout_worker.score(CANARY), trainer.score(CANARY))).max()
            assert difference < 1e-5
            served = await rollout_worker.load_adapter(str(out), step - 1)
            assert served["digest"] == digest_of_file(out / "adapter_model.safetensors")
            metrics = trainer.train(step, rollout["directory"])["metrics"]
            assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5
            assert metrics["train/sc_rollout_head_mass"] == pytest.approx(metrics["train/sc_train_head_mass"], abs=1e-5)
            groups = read_groups(Path(rollout["directory"]))
            assert {s.completion.policy_version for g in groups for s in g.samples} == {step - 1}
            assert all(s.completion.routing is not None for g in groups for s in g.samples)
            means.append(float(np.mean([s.completion.logprobs.mean() for g in groups for s in g.samples])))
        assert len(set(means)) == 3
        await rollout_worker.sleep()
        await rollout_worker.wake()
        assert len(await rollout_worker.score(CANARY)) == len(CANARY) - 1
        await rollout_worker.close()
        trainer.close()

    asyncio.run(main())
    assert "Traceback" not in (tmp_path / "logs" / "server.log").read_text()
