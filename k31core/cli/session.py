"""One training session at the command line: checks, services, the flow in this process, the summary."""

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.checkpoint.lock import LockedError, holder
from k31core.checkpoint.store import StoreError, create_run, run_ids
from k31core.cluster.home import Home, find_home
from k31core.cluster.services import Bringup, ServiceOptions, connect_environment
from k31core.observe.jsonl import read_lines
from k31core.observe.ledger import has_ended
from k31core.recipe.load import load_recipe, override_recipe, read_resolved, resolve, start_lines
from k31core.recipe.recipe import Recipe

STOPPED = 3
"""Exit code of a run that a watchdog or the limit on attempts ended."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the user typed."""

    recipe: str
    overrides: tuple[str, ...]
    save_dir: Path
    run_id: str | None
    resume: str | None
    num_rollout: int | None = None
    skip_saving: bool = False
    prefect_port: int | None = None
    ray_port: int | None = None

    def all_overrides(self) -> list[str]:
        """The overrides, options with a field of their own included."""
        overrides = list(self.overrides)
        if self.num_rollout is not None:
            overrides.append(f"num_rollout={self.num_rollout}")
        if self.skip_saving:
            overrides.append("save.skip_saving=true")
        return overrides


def run_order(order: Order, stage: str = "all") -> int:
    """Check everything that can be checked at once, bring up services, run the flow; returns the exit code."""
    from k31core.cli.live import LiveDisplay

    began = time.monotonic()
    recipe, root = check_order(order)
    home = find_home()
    display = LiveDisplay(root, recipe.num_rollout)
    display.say(f"run {root.name}: {recipe.name}, {recipe.num_rollout} steps, in {root}")
    for line in start_lines(resolve(recipe)):
        display.say(line)
    bring_up(home, recipe, order, display)
    display.say(f"services are up ({time.monotonic() - began:.0f} s)")
    parameters = {
        "recipe": order.recipe,
        "overrides": list(order.overrides),
        "save_dir": str(order.save_dir),
        "run_id": root.name,
        "resume": order.resume is not None,
        "num_rollout": order.num_rollout,
        "skip_saving": order.skip_saving,
        "stage": stage,
        "requested_by": "user",
    }
    return run_flow(parameters, root, display)


def check_order(order: Order) -> tuple[Recipe, Path]:
    """The recipe and the run directory, made when new. Raises our ValueErrors before anything is started."""
    if order.resume is not None:
        run_id = newest_run(order.save_dir) if order.resume == "latest" else Path(order.resume).name
        root = order.save_dir / run_id
        if not (root / "recipe.json").is_file():
            raise unknown_run(root)
        recipe = override_recipe(read_resolved(root / "recipe.json").recipe, order.all_overrides())
    else:
        recipe = load_recipe(order.recipe, order.all_overrides())
        root = order.save_dir / (order.run_id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    refuse_locked(root, "give another --run-id")
    return recipe, create_run(order.save_dir, root.name, resolve(recipe), must_exist=order.resume is not None)


def unknown_run(root: Path) -> StoreError:
    """The error for a run that is not there."""
    known = ", ".join(run_ids(root.parent)[-5:]) or "none"
    return StoreError(f"{root} is not a run directory; runs in {root.parent}: {known}")


def refuse_locked(root: Path, or_else: str) -> None:
    """Raises LockedError when a process works on the run directory."""
    who = holder(root / "lock")
    if who is not None:
        raise LockedError(f"run directory {root} is in use by {who}; wait for it, stop it, or {or_else}")


def newest_run(save_dir: Path) -> str:
    """The newest run that has not ended. Raises StoreError when there is none."""
    for run_id in reversed(run_ids(save_dir)):
        records, _ = read_lines(save_dir / run_id / "ledger.jsonl")
        if not has_ended(records):
            return run_id
    raise StoreError(
        f"nothing to resume in {save_dir}: every run there has ended (give its name to go on with more steps)"
    )


def bring_up(home: Home, recipe: Recipe, order: Order, display: Any) -> None:
    """Start services and, meanwhile, import Prefect and the flow."""
    cluster = recipe.cluster
    cpus = cluster.cpus_per_trainer * recipe.train.parallel.world_size + cluster.cpus_per_engine
    options = ServiceOptions(
        prefect_port=order.prefect_port,
        ray_port=order.ray_port,
        num_cpus=max(2, int(-(-cpus // 1))),
        num_gpus=cluster.gpus_per_node if cluster.num_nodes == 1 else 0,
    )
    bringup = Bringup(home, options)
    connect_environment(home, bringup.endpoints)
    quiet_logging()
    imports = threading.Thread(target=_import_flow, daemon=True)
    imports.start()
    bringup.wait(display.say)
    imports.join()
    from tasks.storage import save_results_block

    save_results_block(home.results)


def _import_flow() -> None:
    import flows.k31  # noqa: F401


def quiet_logging() -> None:
    """Prefect's log goes to its server; the terminal shows our own display. Set before Prefect is imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")


def run_flow(parameters: dict[str, Any], root: Path, display: Any) -> int:
    """Run the flow in this process with the live display."""
    from flows.k31 import k31
    from k31core.cli.main import print_error

    with display:
        try:
            state = k31(**parameters, return_state=True)
        except KeyboardInterrupt:
            return 130
    if state.is_completed():
        if parameters["stage"] == "all":
            display.summary(state.result())
        else:
            for name, value in state.result().items():
                display.say(f"{name}  {value:.4f}" if isinstance(value, float) else f"{name}  {value}")
        return 0
    if state.is_cancelled():
        print_error(str(state.message))
        return STOPPED
    try:
        state.result()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if parameters["stage"] == "all":
            print(
                f"the run stopped; continue with: k31 train --resume {root.name} --save-dir {root.parent}",
                file=sys.stderr,
            )
        raise error
    return 1
