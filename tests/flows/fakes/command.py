"""The `k31` command with the small workers, which come in where the command imports the flow: after it has set the
environment that Prefect and Ray read when they are imported."""

import importlib

from k31core.cli import session
from k31core.cli.main import main


def import_flow() -> None:
    """Import the flow and give it the small workers."""
    importlib.import_module("tests.flows.fakes.run_flow")


if __name__ == "__main__":
    session._import_flow = import_flow
    main()
