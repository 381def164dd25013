"""Progress of long reads and downloads on the terminal: bytes, rate and time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading_bar(title: str, *, visible: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while the block runs; the value takes (bytes done, bytes in all)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as progress:
        task = progress.add_task(title, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield show
