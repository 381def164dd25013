"""The record of SGLang's options and request types is what the installed SGLang says."""

import json

import pytest

from tests.unit.sglang.sglang_source import RECORD, in_sglang, record


@pytest.mark.slow
def test_the_record_equals_the_parser_and_the_request_types() -> None:
    assert json.loads(RECORD.read_text()) == record()


@pytest.mark.slow
def test_our_request_bodies_are_valid_for_the_request_types() -> None:
    """Built by our client's code, validated by SGLang's types and its own check of a generate request."""
    code = """
import json, orjson
from pydantic import TypeAdapter
from sglang.srt.managers import io_struct as io
from k31core.rl.types import GenerateRequest, SamplingParams
from k31core.rollout.engines.sglang.payload import encode_request
asked = GenerateRequest('a', (1, 2, 3), SamplingParams(1.0, 1.0, 0, 8, (2,), 7, 128, True), 0)
seen = []
for flat in (True, False):
    body = orjson.loads(encode_request(asked, rid='a.0', lora_name='k31-v0-1', flat=flat))
    made = TypeAdapter(io.GenerateReqInput).validate_python(body)
    made.normalize_batch_and_arguments()
    assert all(getattr(made, key) == value for key, value in body.items() if key != 'sampling_params')
    seen.append(made.return_flat_raw_output_top_logprobs)
    from sglang.srt.sampling.sampling_params import SamplingParams as Theirs
    params = Theirs(**body['sampling_params'])
    params.normalize(None)
    params.verify(163840)
    assert params.sampling_seed == 7 and params.max_new_tokens == 8
print(json.dumps(seen))
"""
    assert in_sglang(f"exec({code!r})") == [True, False]


@pytest.mark.slow
def test_our_handles_are_read_by_sglangs_own_code() -> None:
    """Serialised by our exporter, opened by SGLang's deserializer and bucket (CPU memory, one process)."""
    code = """
import json, torch
from k31core.ops.digest import Slot
from k31core.sync.buckets import one_bucket
from k31core.sync.handles import serialise, share_by_name
from k31core.workers.sync_source import SGLANG_FORMAT
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
share_by_name()
tensors = {'a': torch.randn(3, 5).bfloat16(), 'b': torch.randn(7), 'c': torch.arange(9, dtype=torch.uint8)}
tree = MultiprocessingSerializer.deserialize(serialise(one_bucket(tensors), SGLANG_FORMAT))
bucket = FlattenedTensorBucket(flattened_tensor=tree['flattened_tensor'], metadata=tree['metadata'])
print(json.dumps({name: bool(torch.equal(t, tensors[name])) for name, t in bucket.reconstruct_tensors()}))
"""
    assert in_sglang(f"exec({code!r})") == {"a": True, "b": True, "c": True}
