"""The limit on silence: files of real signs of life, a clock of the test."""

from pathlib import Path

import pytest

from k31core.cluster.calls import WorkerLostError
from k31core.cluster.hang import HangError, SilenceWatch
from k31core.observe.progress import FOLDER, ProgressFile, read_signs


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_is_counted_from_the_last_sign_of_any_worker(tmp_path: Path) -> None:
    clock, trainer = Clock(), ProgressFile(tmp_path, "trainer-3", interval_s=0)
    trainer.note("an old note, of the step before")
    watch = SilenceWatch(tmp_path, "train", 60.0, clock=clock)
    clock.now = 160.0
    watch()
    trainer.note("microbatch 17")
    clock.now = 200.0
    watch()
    ProgressFile(tmp_path, "engine", interval_s=0).note("answer 5")
    clock.now = 255.0
    watch()
    clock.now = 315.0
    watch()
    clock.now = 316.0
    with pytest.raises(HangError, match=r"phase train: no sign of life for 61 s .* 60\); last: engine: answer 5"):
        watch()
    assert issubclass(HangError, WorkerLostError), "the flow replaces the workers"


def test_the_same_note_again_is_a_sign_and_none_at_all_is_not(tmp_path: Path) -> None:
    clock, trainer = Clock(), ProgressFile(tmp_path, "trainer-0", interval_s=0)
    trainer.note("microbatch")
    watch = SilenceWatch(tmp_path, "train", 10.0, clock=clock)
    for _ in range(5):
        clock.now += 9.0
        trainer.note("microbatch")
        watch()
    clock.now += 11.0
    with pytest.raises(HangError, match="last: trainer-0: microbatch"):
        watch()
    silent = SilenceWatch(tmp_path / "nothing-there", "rollout", 10.0, clock=clock)
    clock.now += 11.0
    with pytest.raises(HangError, match="last: it began"):
        silent()


def test_notes_within_a_second_are_one_and_torn_files_are_left_out(tmp_path: Path) -> None:
    seldom = ProgressFile(tmp_path, "engine", interval_s=3600)
    for number in range(3):
        seldom.note(f"answer {number}")
    assert read_signs(tmp_path)["engine"].startswith("answer 0 (note 1 ")
    (tmp_path / FOLDER / "trainer-0.json").write_text('{"count": 3, "wh')
    assert list(read_signs(tmp_path)) == ["engine"]
