"""`k31 export`: a saved adapter in the layout that other tools load."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    adapter: Annotated[Path, typer.Argument(help="Adapter directory, e.g. runs/RUN/adapters/step-000040.")],
    target: Annotated[Path, typer.Argument(help="New directory for the PEFT adapter.")],
    shard_gb: Annotated[float, typer.Option(help="Start a new weight file above this size (GB).")] = 5.0,
) -> None:
    """Write PEFT-style files: adapter_config.json and (sharded) adapter_model.safetensors.

    The tensors keep their bytes; names are those that SGLang's shared outer LoRA expects. `k31 import-adapter` is the
    inverse.
    """
    from k31core.checkpoint.peft import export_peft

    files = export_peft(adapter, target, shard_bytes=round(shard_gb * 1e9))
    typer.echo(f"{len(files)} weight file{'s' if len(files) > 1 else ''} in {target}")
