"""Metrics to Weights & Biases: online with a key, offline without one (then `wandb sync DIR` uploads them later)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbSink:
    """One wandb run for a run directory; a resumed run continues it."""

    def __init__(self, run_dir: Path, *, project: str, config: Mapping[str, Any]) -> None:
        """Start (or continue) the wandb run named like the run directory."""
        import wandb

        with_key = bool(os.environ.get("WANDB_API_KEY"))
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if with_key else "offline")
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=run_dir.name,
            resume="allow" if with_key else None,
            mode=mode,
            dir=str(run_dir),
            config=dict(config),
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the metrics of a step; a step that was sent before a resume is ignored by wandb."""
        self._run.log({name: value for name, value in values.items() if isinstance(value, int | float)}, step=step)

    def close(self) -> None:
        """Flush and end."""
        self._run.finish()
