"""A report of this very machine, with folders and an nvidia-smi made for the test."""

import hashlib
import json
import platform
import re
import time
from pathlib import Path

import psutil
import pytest

from k31core.cluster.node_report import (
    IMAGE_VARIABLE,
    Gpu,
    NodeQuery,
    NodeReport,
    collect,
    read_answers,
    remove_token,
    write_token,
)
from tests.unit.cluster.sysfs_tree import write_hcas


def write_checkpoint(folder: Path, shards: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(shards)}})
    )
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    return folder


def write_smi(folder: Path, body: str) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, "v7")
    before = time.time()
    report = collect(NodeQuery("n0", save_dir=str(tmp_path), infiniband_root=str(write_hcas(tmp_path / "ib", 2))))
    assert report.architecture == platform.machine()
    assert report.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < report.memory_available_bytes <= report.memory_total_bytes
    assert report.save_free_bytes is not None
    assert report.save_free_bytes > 0
    assert report.image == "v7"
    assert before <= report.started_at <= report.finished_at <= time.time()
    assert [port.name for port in report.ports.ports] == ["mlx5_0:1", "mlx5_1:1"]
    assert NodeReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_cards_and_driver_from_nvidia_smi(tmp_path: Path) -> None:
    body = 'echo "0, NVIDIA H200, GPU-aa, 143771, 4, 570.86.15"\necho "1, NVIDIA H200, GPU-bb, 143771, 9000, 570.86.15"'
    report = collect(NodeQuery("n0", nvidia_smi=write_smi(tmp_path, body)))
    assert report.gpus == (
        Gpu(0, "NVIDIA H200", "GPU-aa", 143771, 4),
        Gpu(1, "NVIDIA H200", "GPU-bb", 143771, 9000),
    )
    assert report.driver == "570.86.15"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('echo "Unable to determine the device handle" >&2\nexit 15', "ended with 15: Unable to determine"),
        ('echo "0, NVIDIA H200, [N/A]"', r"wrote '0, NVIDIA H200, \[N/A\]', expected index"),
    ],
)
def test_a_failing_nvidia_smi_is_reported(tmp_path: Path, body: str, expected: str) -> None:
    report = collect(NodeQuery("n0", nvidia_smi=write_smi(tmp_path, body)))
    assert report.gpus == ()
    assert re.search(expected, report.unread["gpus"])


def test_no_nvidia_smi_is_reported() -> None:
    report = collect(NodeQuery("n0", nvidia_smi="no-such-program"))
    assert report.unread["gpus"] == "no-such-program is not on the PATH"


def test_the_checkpoint_digest_follows_names_sizes_and_config(tmp_path: Path) -> None:
    shards = {"a.safetensors": b"12345", "b.safetensors": b"1"}
    a = write_checkpoint(tmp_path / "a", shards)
    b = write_checkpoint(tmp_path / "b", shards)
    first, second = (collect(NodeQuery("n", model_dir=str(d))) for d in (a, b))
    assert first.checkpoint_digest == second.checkpoint_digest is not None
    assert first.checkpoint_bytes == 6
    expected = hashlib.sha256(b"a.safetensors 5\nb.safetensors 1\n")
    for name in ("config.json", "model.safetensors.index.json"):
        expected.update(name.encode() + hashlib.sha256((a / name).read_bytes()).digest())
    assert first.checkpoint_digest == expected.hexdigest()
    (b / "b.safetensors").write_bytes(b"22")
    assert collect(NodeQuery("n", model_dir=str(b))).checkpoint_digest != first.checkpoint_digest
    (b / "b.safetensors").write_bytes(b"2")
    (b / "config.json").write_text('{"x": 1}')
    assert collect(NodeQuery("n", model_dir=str(b))).checkpoint_digest != first.checkpoint_digest


def test_an_incomplete_checkpoint_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", {"a.safetensors": b"1", "b.safetensors": b"2"})
    (folder / "b.safetensors").unlink()
    report = collect(NodeQuery("n", model_dir=str(folder)))
    assert report.checkpoint_digest is None
    assert "b.safetensors: No such file" in report.unread["checkpoint"]
    report = collect(NodeQuery("n", model_dir=str(tmp_path / "absent")))
    assert "model.safetensors.index.json" in report.unread["checkpoint"]


def test_the_token_goes_out_and_comes_back(tmp_path: Path) -> None:
    write_token(tmp_path / "save", "token-1", "hello")
    for node in ("n0", "n1"):
        report = collect(NodeQuery(node, save_dir=str(tmp_path / "save"), token="token-1"))
        assert report.token_text == "hello"
    elsewhere = collect(NodeQuery("n2", save_dir=str(tmp_path / "other"), token="token-1"))
    assert elsewhere.token_text is None
    assert "No such file" in elsewhere.unread["token"]
    assert read_answers(tmp_path / "save", "token-1") == {"n0": "hello", "n1": "hello"}
    remove_token(tmp_path / "save", "token-1")
    assert list((tmp_path / "save").iterdir()) == []
