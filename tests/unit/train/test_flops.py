"""The operation count against the matrices of a built model."""

import pytest
import torch

from k31core.model.build import Build, ExpertFormat
from k31core.model.config import load_config
from k31core.model.decoder import Decoder
from k31core.model.sizes import KIMI_K31
from k31core.train.flops import forward_flops, train_flops
from tests.unit.train.small_trainer import MODEL


def test_one_token_is_every_matrix_once_and_the_chosen_experts():
    config = load_config(MODEL)
    decoder = Decoder(config, Build(device=torch.device("meta"), experts=ExpertFormat.DENSE))
    used = 0
    for name, parameter in decoder.named_parameters():
        if name.endswith("_dense"):
            used += parameter.numel() * config.num_experts_per_token // config.num_experts
        elif parameter.ndim == 2 and "embed_tokens" not in name and "res_proj" not in name:
            used += parameter.numel()
    mixing = forward_flops(config, [1]) - 2 * used
    assert 0 < mixing < 0.2 * 2 * used  # state updates and one attended key, nothing else


def test_training_is_twice_the_forward_and_attention_stops_growing_at_top_k():
    config = load_config(MODEL)
    assert train_flops(config, [7, 9]) == 2 * (forward_flops(config, [7]) + forward_flops(config, [9]))
    short, long = forward_flops(KIMI_K31, [2048]) / 2048, forward_flops(KIMI_K31, [65536]) / 65536
    without_cap = 2 * 24 * 96 * (192 + 128) * 65536 / 2
    assert long - short < 0.5 * without_cap


def test_published_model_needs_about_the_operations_of_its_active_weights():
    # by hand: 92 x (16 experts 0.53 B + shared 0.13 B + latent 0.05 B), 69 KDA 0.45 B, 24 MLA 0.43 B, head 1.2 B
    per_token = forward_flops(KIMI_K31, [4096]) / 4096
    assert per_token == pytest.approx(2 * 1.05e11, rel=0.25)
