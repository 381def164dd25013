"""Decoding by CUDA graphs: a step is captured once for each bucket of (rows, blocks) and replayed afterwards.

    step (any rows, any blocks) ──► padded to its bucket ──► copied into the graph's inputs ──► replay ──► first rows

The captured step is the eager one; padding rows are those of the eager path (page 0, position 0), so a real row sees
the same operands. The eager path is the reference (`tests/gpu/test_gpu_engine.py` compares them).
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from k31core.ops.experts import PackedExperts
from k31core.rollout.engine import EngineError
from k31core.rollout.engines.embedded.cache import Caches
from k31core.rollout.engines.embedded.forward import CachedDecoder, StepInput

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Captured:
    graph: Any
    inputs: StepInput
    logits: Tensor
    routing: Tensor


class DecodeGraphs:
    """Graphs over one set of caches; make a new one when the caches are allocated anew."""

    def __init__(self, decoder: CachedDecoder, caches: Caches) -> None:
        self._decoder, self._caches = decoder, caches
        self._rows, self._pages = caches.conv.shape[1], caches.latent.shape[1] - 1
        self._pool: Any = None
        self._captured: dict[tuple[int, int], _Captured] = {}

    @property
    def count(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    def decode(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """As `CachedDecoder.decode`. The results live until the next call."""
        rows = len(step.tokens)
        bucket = bucket_of(step, self._rows, self._pages)
        padded = padded_step(step, *bucket)
        captured = self._captured.get(bucket)
        if captured is None:
            captured = self._captured[bucket] = self._capture(padded)
        for target, source in zip(_tensors(captured.inputs), _tensors(padded), strict=True):
            target.copy_(source)
        captured.graph.replay()
        return captured.logits[:rows], captured.routing[:rows]

    def _capture(self, step: StepInput) -> _Captured:
        inputs = StepInput(*(torch.zeros_like(tensor) for tensor in _tensors(step)))
        self._warm_up(inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use the card meanwhile (a trainer beside the engine).
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits, routing = self._decoder.decode(inputs, self._caches)
        except RuntimeError as error:
            raise EngineError(
                f"a decoding step of {len(step.tokens)} rows and {step.pages.shape[1]} blocks could not be captured as "
                f"a CUDA graph ({error}): set rollout.engine.cuda_graphs=false"
            ) from error
        self._pool = self._pool or graph.pool()
        return _Captured(graph, inputs, logits, routing)

    def _warm_up(self, inputs: StepInput) -> None:
        """Run the shape on caches of its own: kernels are compiled and loaded outside the capture, and no state
        moves."""
        model = self._decoder.model
        scratch = Caches(self._decoder.config, len(inputs.tokens), 1, model.build.dtype, model.build.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._decoder.decode(inputs, scratch)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


def bucket_of(step: StepInput, max_rows: int, max_blocks: int) -> tuple[int, int]:
    """(rows, blocks) of the graph for this step: the next powers of two, at most what the caches have."""
    rows, blocks = len(step.tokens), step.pages.shape[1]
    return min(_power_of_two(rows), max_rows), min(_power_of_two(blocks), max_blocks)


def padded_step(step: StepInput, rows: int, blocks: int) -> StepInput:
    """The step with padding rows (token 0 at position 0 of page 0) and unused blocks (page 0) appended."""
    more = rows - len(step.tokens), blocks - step.pages.shape[1]
    return StepInput(
        torch.nn.functional.pad(step.tokens, (0, more[0])),
        torch.nn.functional.pad(step.position, (0, more[0])),
        torch.nn.functional.pad(step.pages, (0, more[1], 0, more[0])),
    )


def why_not(decoder: CachedDecoder) -> str | None:
    """Why this decoder's step cannot be captured, or None: a step must neither wait for the card nor run elsewhere."""
    model = decoder.model
    if model.build.device.type != "cuda":
        return f"the engine computes on {model.build.device.type}"
    if decoder.batches_experts:
        return "the experts are so small that all are computed in one product, whose shape depends on the routing"
    from k31core.ops.experts.kernel import unsupported

    for layer in model.layers.values():
        if layer.block_sparse_moe is not None:
            experts = layer.block_sparse_moe.experts
            weights, probe = experts.weights(), torch.empty(1, 1, dtype=model.build.dtype, device=model.build.device)
            assert isinstance(weights, PackedExperts)
            reason = unsupported(probe, weights, experts.lora(), experts.beta)
            if reason is not None:
                return f"the experts run without the fused kernel: {reason}"
    return None


def decode_graphs(decoder: CachedDecoder, caches: Caches, *, wanted: bool) -> DecodeGraphs | None:
    """Graphs where they are wanted and possible; said once where they are wanted and not."""
    if not wanted:
        return None
    reason = why_not(decoder)
    if reason is not None:
        _log_once(reason)
        return None
    return DecodeGraphs(decoder, caches)


@cache
def _log_once(reason: str) -> None:
    _log.warning("decoding without CUDA graphs: %s", reason)


def _tensors(step: StepInput) -> tuple[Tensor, Tensor, Tensor]:
    return step.tokens, step.position, step.pages


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
