"""The publisher of an adapter that lies in a directory, as the recipe chooses it."""

from pathlib import Path

from k31core.recipe.recipe import Recipe
from k31core.sync.in_process import AdapterSink, InProcessPublisher
from k31core.sync.publisher import Publisher
from k31core.sync.shared_files import SharedFilesPublisher


def file_publisher(sink: AdapterSink, recipe: Recipe) -> Publisher:
    """In process, or over shared files; the latter also where adapters come by memory and a saved one is loaded."""
    sync = recipe.sync
    if sync.transport == "in_process":
        return InProcessPublisher(sink)
    shared = None if sync.shared_dir is None else Path(sync.shared_dir)
    return SharedFilesPublisher(shared, {"the engine": sink}, timeout_s=sync.timeout_s)
