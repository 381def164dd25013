"""Frozen weights leave the card and come back: the memory is free meanwhile, and the results are the same bits."""

import pytest
import torch

from k31core.train.offload import FrozenOffload
from tests.unit.train.small_trainer import small_trainer

pytestmark = pytest.mark.gpu


def test_the_memory_is_free_and_the_scores_are_the_same():
    trainer = small_trainer("train.device=cuda", "cluster.gpus_per_node=1")
    offload = FrozenOffload(trainer.decoder)
    before, held = trainer.score([1, 2, 3, 4, 5]), torch.cuda.memory_allocated()
    for _ in range(3):
        assert offload.offload() == offload.num_bytes > 0
        assert offload.offload() == 0
        assert torch.cuda.memory_allocated() <= held - offload.num_bytes
        assert offload.onload() == offload.num_bytes
        assert trainer.score([1, 2, 3, 4, 5]) == before
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
