"""`k31 prune`: a few layers of a full checkpoint, for smoke tests."""

from pathlib import Path
from typing import Annotated

import typer


def prune(
    model_dir: Annotated[Path, typer.Argument(help="A full native checkpoint.")],
    save_dir: Annotated[Path, typer.Argument(help="Where the small checkpoint goes.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Keep the first so many layers.")] = None,
    keep: Annotated[str | None, typer.Option(help="Keep these layers, counted from 1: 1,2,3,8.")] = None,
) -> None:
    """Cut a checkpoint of a few layers from a full one, at its real widths.

    Reads only what stays. Layers and the configuration's layer lists (KDA, MLA, DSA) are numbered anew.
    """
    from rich.console import Console

    from k31core.convert.prune import prune as prune_checkpoint
    from k31core.convert.source import ConvertError

    if (layers is None) == (keep is None):
        raise ConvertError("give either --layers N or --keep 1,2,3,…")
    try:
        numbers = list(range(1, layers + 1)) if layers is not None else [int(part) for part in str(keep).split(",")]
    except ValueError as error:
        raise ConvertError(f"--keep {keep!r} is not a list of layer numbers like 1,2,3,8") from error
    done = prune_checkpoint(model_dir, save_dir, numbers)
    Console().print(f"{done['layers']} layers, {done['tensors']} tensors in {save_dir}", highlight=False)
