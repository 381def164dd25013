"""One rank of `test_worker_ranks`: plays a list of worker calls and prints their replies as JSON."""

import json
import sys

from k31core.workers.train import TrainWorker


def main() -> None:
    """argv: JSON of {arguments of TrainWorker} and [[method, arguments], ...]."""
    arguments, calls = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    worker = TrainWorker(**arguments)
    replies = [getattr(worker, method)(*values) for method, values in calls]
    worker.close()
    print("REPLIES " + json.dumps(replies), flush=True)


if __name__ == "__main__":
    main()
