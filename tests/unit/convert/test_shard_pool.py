"""The pool of shards: all processes used, a fault ends everything at once, nobody outlives a killed parent."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from k31core.convert.shard_pool import ShardProcessError, over_shards
from tests.unit.convert import shard_work

ROOT = Path(__file__).parents[3]


def wait_for(condition, seconds: float = 60.0) -> bool:
    """Whether `condition()` came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_every_shard_once_in_other_processes(tmp_path: Path) -> None:
    shards = [str(number) for number in range(6)]
    done = list(over_shards(partial(shard_work.named, tmp_path), shards, workers=2))
    assert sorted(shard for shard, _ in done) == shards
    assert 1 <= len({process for _, process in done}) <= 2
    assert all((tmp_path / shard).exists() for shard in shards)


def test_a_fault_ends_the_rest_at_once(tmp_path: Path) -> None:
    shards = [str(number) for number in range(40)]
    begun = time.monotonic()
    with pytest.raises(ValueError, match="shard 0 is damaged"):
        list(over_shards(partial(shard_work.first_fails, tmp_path), shards, workers=2))
    assert time.monotonic() - begun < 50  # one of the others alone takes 60 s
    assert len(list(tmp_path.iterdir())) < 10


def test_a_killed_process_is_said_in_words() -> None:
    with pytest.raises(ShardProcessError, match=r"killed from outside.*fewer --workers than 2"):
        list(over_shards(shard_work.end_abruptly, ["0", "1"], workers=2))


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "from functools import partial; from pathlib import Path; from tests.unit.convert import shard_work\n"
        "from k31core.convert.shard_pool import over_shards\n"
        f"list(over_shards(partial(shard_work.wait_forever, Path({str(tmp_path)!r})), ['a', 'b'], 2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        assert wait_for(lambda: all((tmp_path / s).exists() and (tmp_path / s).read_text() for s in "ab"))
        processes = [psutil.Process(int((tmp_path / s).read_text())) for s in "ab"]
    finally:
        parent.kill()
        parent.wait()
    assert wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), 20)
