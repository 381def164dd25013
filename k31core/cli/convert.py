"""`k31 convert`: checkpoint conversions of the Kimi-K3 path."""

from pathlib import Path
from typing import Annotated

import typer

convert = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Convert a checkpoint: MXFP4 to BF16, then BF16 to torch_dist (Kimi-K3; K3.1 needs neither).",
)


@convert.command("mxfp4-to-bf16")
def mxfp4_to_bf16(
    model_dir: Annotated[Path, typer.Option(help="The MXFP4 checkpoint, as published.")],
    save_dir: Annotated[Path, typer.Option(help="Where the BF16 checkpoint goes (about 3.8 times as large).")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes, one shard each. Default: all cores.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove the result: pack every expert again, compare.")
    ] = False,
) -> None:
    """Decode the routed experts, exactly; carry everything else byte for byte.

    An interrupted conversion continues where it stopped: run the same command again. The index is written last, so
    nothing loads a half-converted directory. A finished one is kept; with --verify it is checked.
    """
    from k31core.cli.main import print_note
    from k31core.cli.transfer_display import reading_bar
    from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
    from k31core.convert.verify_bf16 import verify_bf16

    with reading_bar("mxfp4-to-bf16", visible=True) as progress:
        manifest = convert_to_bf16(model_dir, save_dir, workers=workers, progress=progress)
    print_note(f"{manifest['experts']} expert weights are decoded in {save_dir}")
    if verify:
        with reading_bar("verify", visible=True) as progress:
            counts = verify_bf16(model_dir, save_dir, workers=workers, progress=progress)
        typer.echo(f"bit-equal: {counts['experts']} expert weights packed again, {counts['carried']} tensors carried")


@convert.command("bf16-to-torch-dist")
def bf16_to_torch_dist(
    hf_checkpoint: Annotated[Path, typer.Option(help="The BF16 checkpoint (see mxfp4-to-bf16).")],
    save: Annotated[Path, typer.Option(help="New directory for the torch_dist checkpoint, on storage all ranks see.")],
    tensor_model_parallel_size: Annotated[int | None, typer.Option(min=1, help="Default: all ranks.")] = None,
    expert_model_parallel_size: Annotated[int | None, typer.Option(min=1, help="Default: all ranks.")] = None,
    pipeline_model_parallel_size: Annotated[int, typer.Option(min=1, help="Stages of equal length.")] = 1,
) -> None:
    """Write megatron-core's torch_dist format; training loads it at any layout.

    Run it alone (the files are mapped, memory is no limit, one core is) or on many ranks:
    torchrun --nnodes=8 --nproc-per-node=4 -m k31core.cli.main convert bf16-to-torch-dist --hf-checkpoint … --save …
    """
    import os
    import tempfile

    from pydantic import ValidationError

    from k31core.convert.bf16_to_torch_dist import convert_to_torch_dist, open_for_torch_dist
    from k31core.parallel.groups import init_process_group
    from k31core.parallel.mesh import LayoutError
    from k31core.recipe.train import ParallelRecipe

    open_for_torch_dist(hf_checkpoint, save)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    pp = pipeline_model_parallel_size
    tp, ep = tensor_model_parallel_size or max(1, world // pp), expert_model_parallel_size or max(1, world // pp)
    try:
        layout = ParallelRecipe(tp=tp, pp=pp, ep=ep, dp=max(1, world // (tp * pp)))
    except ValidationError as error:
        raise LayoutError(f"TP {tp}, PP {pp}, EP {ep} on {world} ranks: {error.errors()[0]['msg']}") from error
    with tempfile.TemporaryDirectory() as scratch:
        method = "env://" if world > 1 else f"file://{scratch}/store"
        init_process_group("gloo", method, rank, world, timeout_minutes=60)
        facts = convert_to_torch_dist(hf_checkpoint, save, layout)
    if rank == 0:
        typer.echo(f"{facts['num_hidden_layers']} layers of {facts['family']} in {save}")
