"""`k31 import-adapter`: a PEFT adapter as one of ours."""

from pathlib import Path
from typing import Annotated

import typer


def import_adapter(
    peft: Annotated[Path, typer.Argument(help="PEFT directory, as `k31 export` writes it.")],
    target: Annotated[Path, typer.Argument(help="New adapter directory, e.g. for train.lora.warm_start.")],
) -> None:
    """Read PEFT-style files and write an adapter directory with logical names. The tensors keep their bytes."""
    from k31core.checkpoint.peft import import_peft

    typer.echo(f"{import_peft(peft, target)} tensors in {target}")
