"""Run the flow in this process with the small workers: `python -m tests.flows.fakes.run_flow '{"run_id": …}'`."""

import json
import sys
from pathlib import Path
from typing import Any

import tasks.cluster
import tasks.prepare
from tasks.run_directory import Prepared, Run


def use_small_workers(where: Any = tasks) -> None:
    """Point the cluster stage at the stand-ins and skip the preparation of a real model."""
    tasks.cluster.ROLLOUT_WORKER = ("tests.flows.fakes.workers", "RolloutWorker")
    tasks.cluster.TRAIN_WORKER = ("tests.flows.fakes.workers", "TrainWorker")


def prepare_nothing(run: Run) -> Prepared:
    """A model directory with just a vocabulary size."""
    model = run.home.root / "fake-model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 32}))
    run.prepared = Prepared(model, Path(run.home.root))
    return run.prepared


def main() -> None:
    """Run and print the result, or the final state's name and message."""
    import flows.k31

    use_small_workers()
    flows.k31.prepare = prepare_nothing
    state = flows.k31.k31(**json.loads(sys.argv[1]), return_state=True)
    print("STATE", state.name, (state.message or "")[:2000])


if __name__ == "__main__":
    main()
