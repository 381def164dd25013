"""Downloads through the real Hub client from a Hub look-alike that breaks in every way it can."""

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from k31core.checkpoint.download import Transfer, download_repo
from k31core.checkpoint.download_file import partial_path
from k31core.checkpoint.hub_listing import DownloadError, HubUnreachableError, Repo, asked_wait_s, list_repo
from k31core.checkpoint.verify_files import FILES_MANIFEST, WORK_FOLDER
from tests.hub_lookalike.server import FakeRepo, Fault, HubLookalike, git_blob_id

TOKEN = "hf_test"


def shard(seed: int, size: int = 300_000) -> bytes:
    """A safetensors file of random bytes."""
    data = random.Random(seed).randbytes(size)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


FILES = {
    "config.json": b'{"model_type": "kimi_k31"}',
    "tokenizer.json": b"{}" + b" " * 5000,
    "model-00001-of-00002.safetensors": shard(1),
    "model-00002-of-00002.safetensors": shard(2),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "tokenization_kimi.py": b"print('never run')",
    "README.md": b"# model",
    "pytorch_model.bin": b"\x80" * 5000,
}
NEEDED = {name for name in FILES if name not in {"tokenization_kimi.py", "README.md", "pytorch_model.bin"}}
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login of this machine takes part, and the client waits seconds, not minutes."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # the files are small, so their blocks are too


@pytest.fixture
def hub() -> Iterator[HubLookalike]:
    with HubLookalike(token=TOKEN) as server:
        server.add("org/model", FakeRepo(dict(FILES)))
        yield server


def repo(hub: HubLookalike, **fields: Any) -> Repo:
    return Repo("org/model", endpoint=hub.endpoint, **fields)


def check_content(directory: Path, names: set[str] = NEEDED) -> dict[str, Any]:
    """Asserts that the directory holds exactly the needed files, right, and a manifest that says so; returns it."""
    found = {p.name for p in directory.iterdir() if p.is_file()}
    assert found == names | {FILES_MANIFEST}
    manifest: dict[str, Any] = json.loads((directory / FILES_MANIFEST).read_text())
    entries = {entry["path"]: entry for entry in manifest["files"]}
    assert set(entries) == names
    for name in names:
        data = (directory / name).read_bytes()
        assert data == FILES[name]
        assert entries[name]["sha256"] == hashlib.sha256(data).hexdigest()
        assert entries[name]["size"] == len(data)
        assert entries[name]["git_sha1"] in (None, git_blob_id(data))
    assert not any((directory / WORK_FOLDER / "partial").iterdir())
    return manifest


def test_needed_files_come_with_their_digests(hub: HubLookalike, tmp_path: Path) -> None:
    done = download_repo(repo(hub), tmp_path / "m")
    manifest = check_content(tmp_path / "m")
    commit = hub.repos["org/model"].commit
    assert (done.commit, manifest["commit"], manifest["revision"]) == (commit, commit, "main")
    assert (done.fetched_files, done.kept_files, done.refetched) == (5, 0, {})
    assert all(commit in path for _, path, _ in hub.requests if "/resolve/" in path), "asked by commit, not by branch"
    before = len(hub.requests)
    again = download_repo(repo(hub), tmp_path / "m")
    assert (again.fetched_files, again.kept_files) == (0, 5)
    assert not [path for _, path, _ in hub.requests[before:] if "/api/" not in path]


def test_a_branch_is_resolved_and_recorded(hub: HubLookalike, tmp_path: Path) -> None:
    model = hub.repos["org/model"]
    model.branches["release"] = model.commit
    for revision in ("release", model.commit):
        done = download_repo(repo(hub, revision=revision), tmp_path / revision)
        manifest = json.loads((tmp_path / revision / FILES_MANIFEST).read_text())
        assert (done.commit, manifest["commit"], manifest["revision"]) == (model.commit, model.commit, revision)


def test_python_files_come_only_when_asked(hub: HubLookalike, tmp_path: Path) -> None:
    download_repo(repo(hub), tmp_path / "m", include_code=True)
    check_content(tmp_path / "m", NEEDED | {"tokenization_kimi.py"})


def test_files_that_are_there_are_verified_and_kept(hub: HubLookalike, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / FIRST).write_bytes(FILES[FIRST])
    (directory / "config.json").write_bytes(FILES["config.json"].replace(b"31", b"30"))
    (directory / "tokenizer.json").write_bytes(b"{}")
    done = download_repo(repo(hub), directory)
    check_content(directory)
    assert (done.kept_files, done.fetched_files) == (1, 4)
    assert not hub.gets(FIRST)
    assert (directory / WORK_FOLDER / "quarantine" / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("truncate", after=100_000)],
        [Fault("truncate", after=100_000), Fault("truncate", after=5000), Fault("drop")],
        [Fault("stall", after=150_000, seconds=2.5)],
        [Fault("status", status=429)],
        [Fault("status", status=503), Fault("status", status=500)],
        [Fault("drop"), Fault("drop")],
        [Fault("short", after=120_000)],
    ],
    ids=lambda faults: "+".join(fault.kind for fault in faults),
)
def test_broken_connections_are_resumed(hub: HubLookalike, tmp_path: Path, faults: list[Fault]) -> None:
    hub.fail(FIRST, *faults)
    done = download_repo(repo(hub), tmp_path / "m")
    check_content(tmp_path / "m")
    assert done.refetched == {}
    if faults[0].after:
        assert [h["range"] for h in hub.gets(FIRST) if "range" in h]
        assert hub.bytes_sent[FIRST] < len(FILES[FIRST]) + 1000 * len(faults), "nothing twice but broken blocks"


def test_a_download_goes_on_where_an_earlier_one_stopped(
    hub: HubLookalike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k31core.checkpoint.download_file._FIRST_WAIT_S", 0.01)
    directory = tmp_path / "m"
    hub.fail(FIRST, Fault("truncate", after=200_000), *[Fault("status", status=500)] * 6)
    with pytest.raises(HubUnreachableError, match=r"stopped at 200000 of \d+ bytes .*run the same command again"):
        download_repo(repo(hub), directory)
    entry = next(e for e in list_repo(repo(hub)).files if e.path == FIRST)
    assert partial_path(directory, entry).stat().st_size == 200_000
    assert not (directory / FIRST).exists() and not (directory / FILES_MANIFEST).exists()
    hub.faults.clear()
    sent = hub.bytes_sent[FIRST]
    download_repo(repo(hub), directory)
    check_content(directory)
    assert hub.bytes_sent[FIRST] - sent == len(FILES[FIRST]) - 200_000


def test_wrong_bytes_are_quarantined_and_fetched_again(hub: HubLookalike, tmp_path: Path) -> None:
    hub.fail(FIRST, Fault("corrupt"), Fault("corrupt"))
    hub.fail("config.json", Fault("corrupt"))
    done = download_repo(repo(hub), tmp_path / "m")
    check_content(tmp_path / "m")
    assert done.refetched == {FIRST: 2, "config.json": 1}
    kept = (tmp_path / "m" / WORK_FOLDER / "quarantine" / FIRST).read_bytes()
    assert len(kept) == len(FILES[FIRST]) and kept != FILES[FIRST]


def test_refetching_is_bounded(hub: HubLookalike, tmp_path: Path) -> None:
    hub.fail(FIRST, *[Fault("corrupt")] * 9)
    with pytest.raises(DownloadError, match=f"{FIRST} came wrong 3 times .*kept as .*quarantine.*check HF_ENDPOINT"):
        download_repo(repo(hub), tmp_path / "m", attempts=3)
    assert len(hub.gets(FIRST)) == 3
    assert not (tmp_path / "m" / FIRST).exists() and not (tmp_path / "m" / FILES_MANIFEST).exists()


def test_an_etag_that_changes_in_the_middle_never_mixes_two_files(hub: HubLookalike, tmp_path: Path) -> None:
    hub.fail(FIRST, Fault("truncate", after=100_000), Fault("etag"), Fault("etag"))
    done = download_repo(repo(hub), tmp_path / "m")
    check_content(tmp_path / "m")
    assert done.commit == hub.repos["org/model"].commit


def test_a_listing_that_fails_is_asked_again(hub: HubLookalike, tmp_path: Path) -> None:
    hub.fail("api", Fault("status", status=503), Fault("status", status=429), Fault("drop"))
    download_repo(repo(hub), tmp_path / "m")
    check_content(tmp_path / "m")


@pytest.mark.parametrize("path", [FIRST, "api"])
def test_the_hub_says_how_long_to_wait(hub: HubLookalike, tmp_path: Path, path: str) -> None:
    hub.fail(path, Fault("status", status=429, retry_after=2))
    began = time.monotonic()
    download_repo(repo(hub), tmp_path / "m")
    assert time.monotonic() - began >= 2.0, "without the header the next try comes after half a second"
    check_content(tmp_path / "m")


def test_what_retry_after_may_say() -> None:
    said = {"": 0.0, "7": 7.0, " 7 ": 7.0, "9" * 400: 300.0, "-1": 0.0, "Wed, 21 Oct 2026 07:28:00 GMT": 0.0, "٣": 0.0}
    assert {text: asked_wait_s({"retry-after": text}) for text in said} == said
    assert asked_wait_s({}) == 0.0


def test_files_come_side_by_side(hub: HubLookalike, tmp_path: Path) -> None:
    for name in sorted(NEEDED):
        hub.fail(name, Fault("stall", after=len(FILES[name]), seconds=1.0))
    download_repo(repo(hub), tmp_path / "m")
    check_content(tmp_path / "m")
    assert hub.most_at_once > 1


def test_a_disk_that_takes_no_more_in_the_middle_is_one_error(hub: HubLookalike, tmp_path: Path) -> None:
    """A real limit of the system on the size of a file: writing fails as on a full disk, after some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(DownloadError, match=r"cannot be written .*free some space or choose another disk"):
            download_repo(repo(hub), tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "m" / FIRST).exists() and not (tmp_path / "m" / FILES_MANIFEST).exists()
    download_repo(repo(hub), tmp_path / "m")
    check_content(tmp_path / "m")


def test_missing_gated_private_and_wrong_names(
    hub: HubLookalike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/gated", FakeRepo(dict(FILES), gated=True))
    hub.add("org/private", FakeRepo(dict(FILES), private=True))
    hub.add("org/pictures", FakeRepo({"a.png": b"x"}))
    hub.add("org/evil", FakeRepo({"../evil.json": b"{}"}))
    for name, revision, message in (
        ("org/nothing", None, r"org/nothing: no such model, or a private one; check the name, and log in with"),
        ("org/private", None, r"no such model, or a private one.*HF_TOKEN"),
        ("org/gated", None, r"org/gated: .*gated.*accept its conditions"),
        ("org/model", "v9", r"org/model: no revision 'v9'"),
        ("org/pictures", None, r"none of its 1 files is needed here"),
        ("org/evil", None, r"leads out of the directory"),
        ("a/b/c", None, r"a/b/c: not a repository name .*use `owner/name`"),
    ):
        with pytest.raises(DownloadError, match=message):
            download_repo(Repo(name, revision=revision, endpoint=hub.endpoint), tmp_path / "m")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("org/private", "org/gated"):
        download_repo(Repo(name, endpoint=hub.endpoint), tmp_path / name)
        check_content(tmp_path / name)
    elsewhere = [headers for method, path, headers in hub.requests if path.startswith("/cdn/")]
    assert elsewhere and all("authorization" not in headers for headers in elsewhere), "the token stays on the Hub"


def test_a_full_disk_is_seen_before_the_first_byte(
    hub: HubLookalike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=600_000))
    with pytest.raises(DownloadError, match=r"0\.0 GB are still to be fetched and the disk has 0\.0 GB free"):
        download_repo(repo(hub), tmp_path / "m")
    assert not hub.gets(FIRST)


def test_without_a_hub_a_whole_directory_is_accepted(tmp_path: Path) -> None:
    with HubLookalike() as hub:
        hub.add("org/model", FakeRepo(dict(FILES)))
        download_repo(repo(hub), tmp_path / "m")
    gone = repo(hub)
    with pytest.raises(HubUnreachableError, match="copy the files into the directory by hand"):
        download_repo(gone, tmp_path / "empty")
    done = download_repo(gone, tmp_path / "m")
    assert done.offline and done.commit == FakeRepo(dict(FILES)).commit
    with pytest.raises(DownloadError, match=r"holds commit .* the recipe asks for 0000"):
        download_repo(Repo("org/model", revision="0" * 40, endpoint=hub.endpoint), tmp_path / "m")
    by_hand = tmp_path / "by-hand"
    shutil.copytree(tmp_path / "m", by_hand, ignore=shutil.ignore_patterns(FILES_MANIFEST, WORK_FOLDER))
    assert download_repo(gone, by_hand).commit is None
    (by_hand / FIRST).write_bytes(FILES[FIRST][:-1] + b"\0")
    with pytest.raises(HubUnreachableError, match=f"not whole: {FIRST} has sha256"):
        download_repo(gone, by_hand)
    (by_hand / FILES_MANIFEST).unlink()
    (by_hand / FIRST).write_bytes(FILES[FIRST][:-1])
    with pytest.raises(HubUnreachableError, match=f"not whole: {FIRST} has .* its header describes"):
        download_repo(gone, by_hand)


def test_data_sets_download_too(hub: HubLookalike, tmp_path: Path) -> None:
    row = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}).encode() + b"\n"
    hub.add("org/data", FakeRepo({"train.jsonl": row * 100, "README.md": b"x", "load.py": b"x"}, repo_type="dataset"))
    download_repo(Repo("org/data", "dataset", endpoint=hub.endpoint), tmp_path / "d")
    assert {p.name for p in (tmp_path / "d").iterdir() if p.is_file()} == {"train.jsonl", FILES_MANIFEST}
    with pytest.raises(DownloadError, match="no such model"):
        download_repo(Repo("org/data", endpoint=hub.endpoint), tmp_path / "e")


def test_progress_tells_bytes_rate_and_time_left(hub: HubLookalike, tmp_path: Path) -> None:
    hub.fail(FIRST, Fault("stall", after=150_000, seconds=0.9))
    seen: list[tuple[int, int, float]] = []

    def notify(transfer: Transfer) -> None:
        seen.append((transfer.done_bytes, transfer.files_done, transfer.rate))

    download_repo(repo(hub), tmp_path / "m", notify=notify)
    total = sum(len(FILES[name]) for name in NEEDED)
    assert seen[-1][:2] == (total, 5)
    assert any(0 < done < total and rate > 0 for done, _, rate in seen)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    transfer = Transfer(total_bytes=100, done_bytes=40, fetched_bytes=30, seconds=3.0)
    assert (transfer.rate, transfer.eta_s) == (10.0, 6.0)


def test_two_downloads_into_one_directory_do_not_mix(hub: HubLookalike, tmp_path: Path) -> None:
    (tmp_path / "m" / WORK_FOLDER).mkdir(parents=True)
    script = (
        "import fcntl,sys,time\nfile=open(sys.argv[1],'a')\nfcntl.flock(file,fcntl.LOCK_EX)\nprint(1,flush=True)\n"
        "time.sleep(60)"
    )
    lock = str(tmp_path / "m" / WORK_FOLDER / "lock")
    with subprocess.Popen([sys.executable, "-c", script, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            with pytest.raises(DownloadError, match="another process downloads into it"):
                download_repo(repo(hub), tmp_path / "m")
        finally:
            holder.kill()
    download_repo(repo(hub), tmp_path / "m")
    assert os.path.exists(tmp_path / "m" / FIRST)
