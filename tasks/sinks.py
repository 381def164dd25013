"""Where metrics go besides the run directory: wandb."""

from k31core.observe.sinks.wandb import WandbSink
from tasks.run_directory import Run


def open_sinks(run: Run) -> None:
    """Open what the recipe asks for; closed with the run."""
    observe = run.recipe.observe
    if observe.wandb:
        config = run.recipe.model_dump(mode="json")
        sink = WandbSink(run.store.root, project=observe.wandb_project, config=config)
        run.sinks.append(sink)
        run.cleanup.append(sink.close)
