"""Random but valid samples for trainer tests."""

import numpy as np

from k31core.train.samples import SampleLimits, TrainSample


def limits(**changes) -> SampleLimits:
    """Limits of a small model: 4 layers of which 0 is dense, 6 experts, 2 a token."""
    values = {
        "vocab_size": 20,
        "max_tokens": 64,
        "candidates": 5,
        "moe_layers": (1, 2, 3),
        "num_layers": 4,
        "num_experts": 6,
        "experts_per_token": 2,
        "replay_routing": True,
    }
    return SampleLimits(**{**values, **changes})


def random_sample(name: str, seed: int, bound: SampleLimits, prompt=None, response=None, **changes) -> TrainSample:
    """A sample whose every field is drawn from `seed`."""
    rng = np.random.default_rng(seed)
    p = prompt or int(rng.integers(1, 8))
    r = response or int(rng.integers(1, 8))
    full = np.sort(rng.normal(size=(r, bound.vocab_size)).astype(np.float32))[:, ::-1]
    logq = full - np.log(np.exp(full).sum(-1, keepdims=True))
    ids = np.stack([rng.permutation(bound.vocab_size)[: bound.candidates] for _ in range(r)]).astype(np.int32)
    routing = (
        np.stack(
            [
                np.stack(
                    [rng.permutation(bound.num_experts)[: bound.experts_per_token] for _ in range(bound.num_layers)]
                )
                for _ in range(p + r - 1)
            ]
        )
        if p + r > 1
        else np.zeros((0, bound.num_layers, bound.experts_per_token))
    )
    values = {
        "sample_id": name,
        "prompt": rng.integers(0, bound.vocab_size, p).astype(np.int32),
        "response": ids[:, 0].copy(),
        "logprobs": logq[:, 0].copy(),
        "top_ids": ids,
        "top_logprobs": logq[:, : bound.candidates].copy(),
        "routing": routing.astype(np.int16),
        "advantage": float(rng.normal()),
    }
    return TrainSample(**{**values, **changes})
