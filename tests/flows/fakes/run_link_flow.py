"""`run_flow` with trainer ranks of `link_faults`."""

import tasks.cluster
from tests.flows.fakes import run_flow

if __name__ == "__main__":
    tasks.cluster.TRAIN_WORKER = ("tests.flows.fakes.link_faults", "TrainWorker")
    run_flow.main()
