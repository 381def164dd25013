"""The flow with the small workers.

`python -m tests.flows.fakes.run_flow '{"run_id": …}' …` runs the flow in this process once for each argument and
prints its final state; `… serve` serves it as deployment `k31/train`.
"""

import json
import os
import sys
from pathlib import Path

import flows.k31
import tasks.cluster
from tasks.run_directory import Prepared, Run


def prepare_nothing(run: Run) -> Prepared:
    """A model directory with just a vocabulary size."""
    model = run.home.root / "fake-model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 32}))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    run.prepared = Prepared(model, Path(run.home.root))
    return run.prepared


def use_small_workers() -> None:
    """Point the cluster stage at the stand-ins and skip the preparation of a real model."""
    tasks.cluster.ROLLOUT_WORKER = ("tests.flows.fakes.workers", "RolloutWorker")
    tasks.cluster.TRAIN_WORKER = ("tests.flows.fakes.workers", "TrainWorker")
    passed_on = {name: value for name, value in os.environ.items() if name.startswith("K31_FAKE_")}
    plain = tasks.cluster._environment
    tasks.cluster._environment = lambda run, threads: {**plain(run, threads), **passed_on}
    flows.k31.prepare = flows.k31.prepare_evaluation = prepare_nothing


use_small_workers()
k31 = flows.k31.k31


def main() -> None:
    """See the module."""
    if sys.argv[1] == "serve":
        k31.serve(name="train", pause_on_shutdown=False)
        return
    for text in sys.argv[1:]:
        state = k31(**json.loads(text), return_state=True)
        print("STATE", json.dumps({"name": state.name, "message": state.message}), flush=True)


if __name__ == "__main__":
    main()
