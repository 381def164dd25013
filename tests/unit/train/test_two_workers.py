"""Rollout worker and trainer worker together: the engine's real record trains, and both run the same model."""

import asyncio

import numpy as np
import pytest

from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.recipe.load import load_recipe
from k31core.workers.rollout import RolloutWorker
from k31core.workers.train import TrainWorker
from tests.loop_inputs import OVERRIDES, write_loop_inputs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(model directory, data directory) of a random 4-layer model with the tiny tokenizer and sums."""
    return write_loop_inputs(tmp_path_factory.mktemp("loop"))


@pytest.mark.parametrize(
    "sampling,mode",
    [((), "selected"), (("rollout.top_p=0.9", "rollout.top_logprobs_num=32", "rollout.temperature=0.7"), "support")],
)
def test_what_the_engine_records_is_what_the_trainer_computes(prepared, tmp_path, sampling, mode):
    model, data = prepared
    recipe = load_recipe("tiny", [*OVERRIDES, *sampling])
    assert recipe.candidate_mode == mode
    text = recipe.model_dump_json()

    async def loop():
        engine = RolloutWorker(text, str(tmp_path), str(model), str(data))
        trainer = TrainWorker(text, str(tmp_path), str(model), 0, 1, "")
        await engine.start()
        trainer.start()
        trainer.restore(None)
        cursor, replies = None, []
        for step in range(3):
            # An adapter with live B factors, so that the bypass is compared too.
            for slot in trainer._trainer.optimizer.slots:
                slot.tensor.data.add_(0.02)
            out = tmp_path / f"adapter-{step}"
            out.mkdir()
            trainer._trainer.export(out, optimizer=False)
            rollout = await engine.run(step + 1, cursor, step, str(out))
            cursor = rollout["cursor"]
            canary = [3, 11, 12, 25, 13, 30]
            difference = np.abs(np.subtract(await engine.score(canary), trainer.score(canary))).max()
            served = (await engine.load_adapter(str(out), step))["digest"]
            assert served == trainer._trainer.digest() == digest_of_file(out / "adapter_model.safetensors")
            replies.append((trainer.train(step + 1, rollout["directory"]), difference))
        await engine.close()
        trainer.close()
        return replies

    for reply, canary in asyncio.run(loop()):
        metrics = reply["metrics"]
        assert canary < 1e-5
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5
        assert metrics["train/train_rollout_kl"] < 1e-9
        assert metrics["train/sc_rollout_head_mass"] == pytest.approx(metrics["train/sc_train_head_mass"], abs=1e-5)
        if mode == "support":
            assert metrics["train/sc_rollout_head_mass"] == pytest.approx(1.0, abs=1e-5)
            assert metrics["train/sc_tail_ratio"] == pytest.approx(1.0, abs=0.5)
        else:
            assert metrics["train/sc_rollout_head_mass"] < 0.99
            assert metrics["train/sc_tail_ratio"] == pytest.approx(1.0, abs=1e-3)
