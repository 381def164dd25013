"""The schedule of a step under pipeline parallelism (see `k31core.train.step.Schedule`)."""

from collections.abc import Sequence

from torch import Tensor

from k31core.model.decoder import Decoder
from k31core.parallel.pipeline import run_1f1b
from k31core.rl.loss_records import LossOutputs
from k31core.train.batch import Microbatch, own_chunk
from k31core.train.step import HeadLoss, packed_input


def run_pipelined(decoder: Decoder, batches: Sequence[Microbatch], head_loss: HeadLoss) -> list[LossOutputs]:
    """1F1B over the stages of the decoder's mesh; returns the losses on the last stage, nothing elsewhere."""
    mesh = decoder.build.mesh
    outputs: list[LossOutputs] = []

    def stage(number: int, received: Tensor | None) -> Tensor:
        chunk = own_chunk(batches[number], mesh).to(decoder.build.device)
        out: Tensor = decoder(packed_input(chunk), received)
        if not mesh.last_stage:
            return out
        output = head_loss(out, chunk)
        outputs.append(output)
        # The schedule changes the loss it is given in place; ours is also reported.
        return output.loss.clone()

    run_1f1b(stage, len(batches), mesh, dtype=decoder.build.dtype, hidden_size=decoder.config.hidden_size)
    return outputs
