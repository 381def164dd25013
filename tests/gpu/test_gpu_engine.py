"""The embedded engine on a GPU: agrees with the trainer's forward there, loads adapters, keeps its caches apart."""

import asyncio

import numpy as np
import pytest
import torch

from k31core.checkpoint.adapter import load_adapter
from k31core.checkpoint.adapter_digest import digest_of_file
from k31core.checkpoint.native import NativeCheckpoint
from k31core.model.build import Build, LoraSpec
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.weight_names import adapter_slots, base_slots
from k31core.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from tests.contract.engine_cases import ADAPTER, ALPHA, LIMITS, MODEL, RANK, generate_all, mixed_requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 0.3)])
def test_logprobs_are_the_trainers(dtype, tolerance):
    """Mean difference of sampled log-probs over mixed requests; fp32 products may run in TF32 inside kernels."""
    lora = LoraSpec(RANK, ALPHA)

    async def main():
        engine = await EmbeddedEngine.open(MODEL, EmbeddedOptions(LIMITS, lora, dtype=dtype, device="cuda"))
        try:
            digest = await engine.load_adapter(ADAPTER, 0)
            requests = mixed_requests(version=0)
            return digest, requests, await generate_all(engine, requests), await generate_all(engine, requests[::-1])
        finally:
            await engine.close()

    digest, requests, done, again = asyncio.run(main())
    if dtype is torch.float32:
        assert digest == digest_of_file(ADAPTER / "adapter_model.safetensors")
    decoder = Decoder(load_config(MODEL), Build(lora=lora, dtype=dtype, device=torch.device("cuda")))
    NativeCheckpoint(MODEL).load(base_slots(decoder))
    load_adapter(ADAPTER, adapter_slots(decoder))
    differences, routes, equal = [], [], 0
    for asked in requests:
        completion = done[asked.request_id]
        tokens = torch.tensor([*asked.tokens, *completion.tokens.tolist()], device="cuda")
        routing = torch.from_numpy(completion.routing).cuda()
        replay = torch.cat([routing, torch.arange(3, device="cuda").expand(1, 7, 3).to(routing.dtype)])
        with torch.no_grad():
            bounds = torch.tensor([0, len(tokens)], device="cuda")
            hidden, _ = decoder.forward_captured(Packed(tokens, bounds, routing=replay))
            _, own = decoder.forward_captured(Packed(tokens, bounds))
            logprobs = torch.log_softmax(decoder.logits(hidden), dim=-1)[len(asked.tokens) - 1 : -1]
        chosen = logprobs.gather(1, tokens[len(asked.tokens) :, None]).squeeze(1).cpu().numpy()
        differences.extend(np.abs(chosen - completion.logprobs).tolist())
        routes.append(float((own[:-1] == routing).float().mean()))
        equal += np.array_equal(completion.tokens, again[asked.request_id].tokens)
    print(
        f"{dtype}: mean {np.mean(differences):.2e}, largest {max(differences):.2e}, "
        f"routing equal {np.mean(routes):.4f}, {equal} of {len(requests)} answers equal in another order"
    )
    assert np.mean(differences) < tolerance
