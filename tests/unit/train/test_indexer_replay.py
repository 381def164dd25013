"""Indexer replay from the engine's draw through the record on disk to the trainer's gradients."""

import dataclasses

import numpy as np
import pytest
import torch

from k31core.recipe.errors import RecipeError
from k31core.recipe.load import load_recipe
from k31core.rl.selection import from_positions
from k31core.rl.types import GenerateRequest, Group, Prompt, Sample, SamplingParams, Verdict
from k31core.rl.types import GradeReason as Reason
from k31core.rollout.engines.embedded.core import EngineCore, Limits
from k31core.rollout.engines.embedded.forward import CachedDecoder
from k31core.rollout.episode import StepPlan
from k31core.rollout.records import read_groups, write_groups
from k31core.train.samples import IndexerReplayError
from k31core.train.trainer import build_trainer
from k31core.workers.train import train_samples
from tests.model_cases import config_of, write_checkpoint
from tests.unit.train.small_trainer import OVERRIDES, small_trainer
from tests.unit.train.test_step import assert_same, gradients_of

ON = "rollout.indexer_replay=true"
TOPK, LAYERS = 5, 2


@pytest.fixture(scope="module")
def trainer():
    """The 7-layer case (indexers in layers 3 and 6, top-k 5) with a live adapter."""
    made = small_trainer(ON)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for slot in made.optimizer.slots:
            slot.tensor.add_(torch.randn(slot.tensor.shape, generator=generator) * 0.05)
    return made


@pytest.fixture(scope="module")
def samples(trainer, tmp_path_factory):
    """Two prompts, two answers each, drawn by the embedded engine, written and read back."""
    core = EngineCore(CachedDecoder(trainer.decoder), Limits(8, 1024, 2048))
    params = SamplingParams(1.0, 1.0, 0, 9, (), 0, top_logprobs_num=8, return_routing=True, return_selection=True)
    prompts = [Prompt(f"p{g}", tuple(range(3 + g, 3 + g + n)), "0", g) for g, n in enumerate((3, 11))]
    asked = [
        GenerateRequest(f"1-{p.row}-{i}", p.tokens, dataclasses.replace(params, seed=7 * p.row + i), -1)
        for p in prompts
        for i in range(2)
    ]
    core.submit(asked)
    done = {}
    while core.busy:
        done |= {c.request_id: c for c in core.advance()}
    verdict = Verdict(1, None, Reason.CORRECT)
    groups = []
    for p in prompts:
        own = [done[r.request_id] for r in asked if r.tokens == p.tokens]
        groups.append(Group(p, tuple(Sample(c.request_id, p, c, float(i), verdict, p.row) for i, c in enumerate(own))))
    directory = tmp_path_factory.mktemp("rollout")
    write_groups(directory, groups)
    return train_samples(read_groups(directory), load_recipe("tiny", [*OVERRIDES, ON]), 1)


def test_the_record_is_what_the_trainer_selects_and_replay_changes_nothing(trainer, samples):
    assert [s.selection.bits.shape for s in samples] == [(6, 2, 2)] * 2 + [(14, 2, 3)] * 2
    replayed, metrics, _ = gradients_of(trainer, samples)
    with_limits(trainer, replay_selection=False)
    live, live_metrics, _ = gradients_of(trainer, samples)
    with_limits(trainer, replay_selection=True)
    assert_same(live, replayed, 0.0)
    assert metrics == live_metrics
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_other_keys_are_replayed_in_forward_and_recomputation(trainer, samples):
    newest = [dataclasses.replace(s, selection=newest_keys(s.tokens - 1)) for s in samples]
    live, _, _ = gradients_of(trainer, samples)
    changed, _, _ = gradients_of(trainer, newest)
    assert max(float((a - b).abs().max()) for a, b in zip(live, changed)) > 1e-4
    build = trainer.decoder.build
    assert build.recompute
    trainer.decoder.build = dataclasses.replace(build, recompute=False)
    once, _, _ = gradients_of(trainer, newest)
    trainer.decoder.build = build
    assert_same(once, changed, 0.0)
    packed, _, count = gradients_of(trainer, newest, tokens_per_gpu=21)
    assert count > 1
    assert_same(changed, packed)


def with_limits(trainer, **changes):
    trainer._limits = dataclasses.replace(trainer._limits, **changes)


def newest_keys(inputs):
    rows = np.arange(inputs)[:, None, None] - np.arange(TOPK)
    return from_positions(np.broadcast_to(np.maximum(rows, -1), (inputs, LAYERS, TOPK)), TOPK)


def dropped(keys):
    return dataclasses.replace(keys, bits=keys.bits[1:])


def repeated(keys):
    return dataclasses.replace(keys, bits=np.concatenate([keys.bits, keys.bits[-1:]]))


def one_layer(keys):
    return dataclasses.replace(keys, bits=keys.bits[:, :1])


def emptied(keys):
    bits = keys.bits.copy()
    bits[2, 1] &= bits[2, 1] - 1  # one token fewer in a byte
    return dataclasses.replace(keys, bits=bits)


def looks_ahead(keys):
    bits = keys.bits.copy()
    bits[0, 0, 1] |= 0x10
    return dataclasses.replace(keys, bits=bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "is missing, but rollout.indexer_replay is on"),
        (dropped, r"shape \[5, 2, 2\], expected .* = \[6, 2, 2\]"),
        (repeated, r"shape \[7, 2, 2\]"),
        (one_layer, r"shape \[6, 1, 2\]"),
        (emptied, r"row 7, indexer layer 1 names \d different tokens, expected 5"),
        (looks_ahead, "row 5, indexer layer 0 names token 12, later than itself"),
        (lambda k: dataclasses.replace(k, topk=6), "top-k 6, the model has 5"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused_by_sample_id(trainer, samples, change, message):
    bad = [dataclasses.replace(samples[0], selection=change(samples[0].selection)), *samples[1:]]
    before = [s.tensor.detach().clone() for s in trainer.optimizer.slots]
    with pytest.raises(IndexerReplayError, match=f"sample 1-0-0: the DSA selection .*{message}"):
        trainer.train(bad)
    assert all(torch.equal(a, s.tensor) for a, s in zip(before, trainer.optimizer.slots, strict=True))


def test_a_whole_step_with_replay(trainer, samples):
    metrics = trainer.train(samples).metrics
    assert np.isfinite(metrics["train/loss"]) and metrics["train/grad_norm"] > 0


def test_k3_has_no_indexer_and_says_so(tmp_path):
    with pytest.raises(RecipeError, match=r"indexer_replay needs model\.family 'kimi_k31'"):
        load_recipe("k3-tiny", [ON])
    directory = write_checkpoint(tmp_path / "k3", config_of(layers=3, mla=(3,), k31=False))
    with pytest.raises(RecipeError, match="is a kimi_k3 checkpoint: no DSA indexer"):
        build_trainer(load_recipe("tiny", [*OVERRIDES, ON]), directory)


def test_the_recipe_asks_the_engine_for_it_and_by_default_does_not():
    for overrides, wanted in (([], False), ([ON], True)):
        plan = StepPlan.of(load_recipe("tiny", overrides), 1, 0, (2,))
        assert plan.params.return_selection is wanted
