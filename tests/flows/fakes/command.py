"""The `k31` command with the small workers."""

from k31core.cli.main import main
from tests.flows.fakes.run_flow import use_small_workers

if __name__ == "__main__":
    use_small_workers()
    main()
