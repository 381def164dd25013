"""`k31 verify-model`: check a checkpoint or data directory file by file."""

import json
from pathlib import Path
from typing import Annotated

import typer


def verify_model(
    directory: Annotated[Path, typer.Argument(help="A checkpoint (or data set) directory, e.g. models/Kimi-K3.1.")],
    full: Annotated[
        bool, typer.Option("--full", help="Read and hash every byte, also of files whose size and time are unchanged.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Files hashed at the same time (default: two a core).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Check every file of a directory against the digests of the Hub, or against what it carries itself.

    A directory that k31 downloaded has a manifest (k31-files.json) with the Hub's SHA-256 and git ids; `hf download`
    leaves them too. Without either, the files are checked for their structure (every shard of the index there, each as
    long as its header says) and their digests are recorded, so that the next check sees any change.

    Exit code 0: all right. 1: something is wrong, named file by file. 2: nothing here that could be checked.
    """
    from k31core.checkpoint.verify_directory import verify_directory
    from k31core.cli.transfer_display import reading_bar

    with reading_bar(f"verify {directory.name}", visible=not as_json) as bar:
        result = verify_directory(directory, full=full, workers=workers, bar=bar)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        for line in result.lines():
            print(line)
    if result.problems:
        raise typer.Exit(1)
