"""The real flow with the real workers on a small random model, its preparation done beforehand.

`python -m tests.flows.fakes.run_transport_flow MODEL DATA '{"run_id": …}' …` runs the flow once for each argument.
"""

import json
import sys
from pathlib import Path

import flows.k31
from tasks.run_directory import Prepared, Run


def main() -> None:
    """See the module."""
    model, data = map(Path, sys.argv[1:3])

    def prepared(run: Run) -> Prepared:
        run.prepared = Prepared(model, data)
        return run.prepared

    flows.k31.prepare = prepared
    for text in sys.argv[3:]:
        state = flows.k31.k31(**json.loads(text), return_state=True)
        print("STATE", json.dumps({"name": state.name, "message": state.message}), flush=True)


if __name__ == "__main__":
    main()
