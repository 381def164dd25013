"""For GPU tests on a machine that is lent for minutes: what a test is doing is seen, and none can take all the time."""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.gpu.tuning import few_candidates

LIMIT_S = 170


@pytest.fixture
def bounded() -> Iterator[None]:
    """Ends the process after `LIMIT_S` seconds of one test, with the stack of every thread."""
    if not hasattr(sys.__stderr__, "fileno"):
        yield
        return
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Prints at once, with the seconds since the test began, whether pytest captures or not."""
    begun = time.monotonic()

    def out(*words: object) -> None:
        with capsys.disabled():
            print(f"[{time.monotonic() - begun:6.1f} s]", *words, flush=True)

    return out


@pytest.fixture(name="few_candidates")
def with_few_candidates() -> Iterator[None]:
    """See `tests.gpu.tuning`."""
    with few_candidates():
        yield
