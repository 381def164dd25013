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
    workers: Annotated[int | None, typer.Option(help="Processes, one shard each. Default: all cores.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove the result: pack every expert again, compare.")
    ] = False,
) -> None:
    """Decode the routed experts, exactly; carry everything else byte for byte.

    An interrupted conversion continues where it stopped: run the same command again. The index is written last, so
    nothing loads a half-converted directory. With --verify a finished result is only checked.
    """
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from k31core.checkpoint.native import INDEX
    from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
    from k31core.convert.verify_bf16 import verify_bf16

    console = Console()
    if not (verify and (save_dir / INDEX).is_file()):
        columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("mxfp4-to-bf16", total=None)
            manifest = convert_to_bf16(
                model_dir,
                save_dir,
                workers=workers,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        console.print(f"{manifest['experts']} expert weights decoded into {save_dir}", highlight=False)
    if verify:
        with Progress(console=console) as bar:
            task = bar.add_task("verify", total=None)
            counts = verify_bf16(
                model_dir, save_dir, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        console.print(
            f"bit-equal: {counts['experts']} experts' weights packed again, {counts['carried']} tensors carried",
            highlight=False,
        )


@convert.command("bf16-to-torch-dist")
def bf16_to_torch_dist(
    hf_checkpoint: Annotated[Path, typer.Option(help="The BF16 checkpoint (see mxfp4-to-bf16).")],
    save: Annotated[Path, typer.Option(help="New directory for the torch_dist checkpoint, on storage all ranks see.")],
    tensor_model_parallel_size: Annotated[int | None, typer.Option(help="Default: all ranks.")] = None,
    expert_model_parallel_size: Annotated[int | None, typer.Option(help="Default: all ranks.")] = None,
    pipeline_model_parallel_size: Annotated[int, typer.Option(help="Stages of equal length.")] = 1,
) -> None:
    """Write megatron-core's torch_dist format; training loads it at any layout.

    Run it alone (one process holds the whole model) or on many ranks:
    torchrun --nnodes=8 --nproc-per-node=4 -m k31core.cli.main convert bf16-to-torch-dist --hf-checkpoint … --save …
    """
    import os
    import tempfile

    from k31core.convert.bf16_to_torch_dist import convert_to_torch_dist
    from k31core.parallel.groups import init_process_group
    from k31core.recipe.train import ParallelRecipe

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    pp = pipeline_model_parallel_size
    tp, ep = tensor_model_parallel_size or world // pp, expert_model_parallel_size or world // pp
    layout = ParallelRecipe(tp=tp, pp=pp, ep=ep, dp=max(1, world // (tp * pp)))
    with tempfile.TemporaryDirectory() as scratch:
        method = "env://" if world > 1 else f"file://{scratch}/store"
        init_process_group("gloo", method, rank, world, timeout_minutes=60)
        facts = convert_to_torch_dist(hf_checkpoint, save, layout)
    if rank == 0:
        typer.echo(f"{facts['num_hidden_layers']} layers of {facts['family']} in {save}")
