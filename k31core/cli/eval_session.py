"""One evaluation at the command line: checks, services, the flow's stage `eval` in this process, the numbers."""

from dataclasses import dataclass
from pathlib import Path

from k31core.checkpoint.store import newest_saved
from k31core.cli.session import Order, bring_up, refuse_locked, run_flow, unknown_run
from k31core.cluster.home import find_home
from k31core.recipe.eval_request import EvalRequest
from k31core.recipe.load import read_resolved


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the user typed for `k31 eval`."""

    run: str
    """Name or directory; `latest` is the newest run with a save."""
    save_dir: Path
    wanted: EvalRequest


def run_evaluation(order: Evaluation) -> int:
    """Check what can be checked at once, bring up services, evaluate in this process; returns the exit code."""
    from k31core.cli.live import LiveDisplay

    run_id = newest_saved(order.save_dir) if order.run == "latest" else Path(order.run).name
    root = order.save_dir / run_id
    if not (root / "recipe.json").is_file():
        raise unknown_run(root)
    home = find_home()
    recipe = order.wanted.recipe(read_resolved(root / "recipe.json").recipe, home.data)
    refuse_locked(root, "copy the run directory")
    display = LiveDisplay(root, recipe.num_rollout)
    heldout, how = recipe.data.heldout, recipe.eval
    assert heldout is not None, "EvalRequest.recipe refuses a recipe without one"
    display.say(
        f"run {run_id}: eval/{how.name} on {heldout.path or heldout.repo or heldout.name}, "
        f"{how.samples_per_prompt} answers a prompt at temperature {how.temperature:g}"
    )
    services = Order(recipe="", overrides=(), save_dir=order.save_dir, run_id=None, resume=run_id)
    bring_up(home, recipe, services, display)
    data = order.wanted.data
    parameters = {
        "save_dir": str(order.save_dir),
        "run_id": run_id,
        "stage": "eval",
        "overrides": list(order.wanted.overrides),
        "requested_by": "user",
        "data": heldout.path if data is not None and heldout.source == "file" else data,
        "step": order.wanted.step,
        "n_samples_per_eval_prompt": order.wanted.samples,
        "temperature": order.wanted.temperature,
    }
    return run_flow(parameters, root, display)
