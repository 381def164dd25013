"""`k31 convert`: checkpoint conversions of the Kimi-K3 path."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Conversion(StrEnum):
    """What is made from what."""

    MXFP4_TO_BF16 = "mxfp4-to-bf16"


def convert(
    what: Annotated[Conversion, typer.Argument(help="mxfp4-to-bf16: decode the routed experts, exactly.")],
    model_dir: Annotated[Path, typer.Option(help="The MXFP4 checkpoint, as published.")],
    save_dir: Annotated[Path, typer.Option(help="Where the BF16 checkpoint goes (about 3.8 times as large).")],
    workers: Annotated[int | None, typer.Option(help="Processes, one shard each. Default: all cores.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove the result: pack every expert again, compare.")
    ] = False,
) -> None:
    """Convert a checkpoint, shard by shard.

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
            task = bar.add_task(str(what), total=None)
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
