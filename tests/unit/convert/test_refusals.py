"""What a user can get wrong at the command line: each is one line that names the thing, and nothing was written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k31core.checkpoint.native import INDEX
from k31core.cli.main import INPUT_FAULT, run
from k31core.convert.mxfp4_to_bf16 import convert_to_bf16
from k31core.convert.source import RECORDS
from tests.unit.convert.sources import mxfp4_copy

TO_BF16 = ["convert", "mxfp4-to-bf16"]
TO_TORCH_DIST = ["convert", "bf16-to-torch-dist"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mxfp4`, its conversion `bf16`, and damaged relatives of both."""
    root = tmp_path_factory.mktemp("refusals")
    convert_to_bf16(mxfp4_copy(root), root / "bf16", workers=1)
    (root / "half" / RECORDS).mkdir(parents=True)
    for name in ("no-index", "other-format", "no-codes"):
        (root / name).mkdir()
        (root / name / "config.json").write_bytes((root / "mxfp4" / "config.json").read_bytes())
    config = json.loads((root / "mxfp4" / "config.json").read_text())
    config["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"
    (root / "other-format" / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {"a.weight_packed": "a.safetensors"}}
    (root / "other-format" / INDEX).write_text(json.dumps(index))
    (root / "other-format" / "a.safetensors").write_bytes(b"")
    (root / "no-codes" / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "a.safetensors"}}))
    (root / "no-codes" / "a.safetensors").write_bytes(b"")
    (root / "full").mkdir()
    (root / "full" / "something").write_text("else")
    (root / "file").write_text("no directory")
    return root


def to_bf16(source: str, target: str) -> list[str]:
    return [*TO_BF16, "--model-dir", source, "--save-dir", target, "--workers", "1"]


def to_torch_dist(source: str, target: str, *more: str) -> list[str]:
    return [*TO_TORCH_DIST, "--hf-checkpoint", source, "--save", target, *more]


WRONG: list[tuple[list[str], str]] = [
    (to_bf16("absent", "new"), "absent is not a directory"),
    (to_bf16("file", "new"), "file is not a directory"),
    (to_bf16("full", "new"), "config.json is missing"),
    (to_bf16("bf16", "new"), "is a BF16 checkpoint (no quantization_config), an MXFP4 one is needed here"),
    (to_bf16("half", "new"), "is half-converted"),
    (to_bf16("no-index", "new"), "half-converted or half-downloaded"),
    (to_bf16("other-format", "new"), "quantization_config says 'nvfp4-pack-quantized'"),
    (to_bf16("no-codes", "new"), "packed tensors are absent"),
    (to_bf16("mxfp4", "mxfp4"), "contain one another"),
    (to_bf16("mxfp4", "mxfp4/inside"), "contain one another"),
    (to_bf16("mxfp4", "."), "contain one another"),
    (to_bf16("mxfp4", "file"), "file is a file: give a directory"),
    (to_bf16("mxfp4", "no-index"), "holds a checkpoint that is no conversion"),
    (to_torch_dist("absent", "new"), "absent is not a directory"),
    (to_torch_dist("mxfp4", "new"), "is an MXFP4 checkpoint"),
    (to_torch_dist("half", "new"), "is half-converted"),
    (to_torch_dist("bf16", "bf16/inside"), "contain one another"),
    (to_torch_dist("bf16", "file"), "file is a file: give a directory"),
    (to_torch_dist("bf16", "new", "--expert-model-parallel-size", "3"), "ep 3 does not divide TP·CP·DP = 1"),
    (["prune", "bf16", "new", "--layers", "4"], "is a BF16 checkpoint"),
    (["prune", "half", "new", "--layers", "4"], "is half-converted"),
    (["prune", "mxfp4", "mxfp4/inside", "--layers", "4"], "contain one another"),
    (["prune", "mxfp4", "bf16", "--layers", "4"], "already holds a checkpoint"),
    (["prune", "mxfp4", "new", "--layers", "99"], "rising numbers from 1 to 7, got [1, 2, 3, … 99]"),
    (["prune", "mxfp4", "new", "--keep", "4,1"], "rising numbers from 1 to 7, got [4, 1]"),
    (["prune", "mxfp4", "new", "--keep", "1,x"], "--keep '1,x' is not a list of layer numbers"),
    (["prune", "mxfp4", "new"], "give either --layers N or --keep"),
    (["prune", "mxfp4", "new", "--layers", "3"], "no layer of full_attn_layers is kept"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(wrong[0]) for wrong in WRONG])
def test_refused_by_name(
    place: Path, capsys: pytest.CaptureFixture[str], in_place: None, arguments: list[str], message: str
) -> None:
    assert run(arguments) == INPUT_FAULT
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (place / "new").exists()


@pytest.fixture
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.mark.parametrize(
    "arguments",
    [
        [*to_bf16("mxfp4", "new"), "--workers", "0"],
        ["prune", "mxfp4", "new", "--layers", "0"],
        to_torch_dist("bf16", "new", "--tensor-model-parallel-size", "0"),
    ],
    ids=str,
)
def test_counts_of_zero_are_usage_errors(
    in_place: None, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(arguments) == 2
    assert "greater than or equal to 1" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["bf16"])
def test_converting_and_verifying_again_says_what_was_proved(
    in_place: None, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert run([*to_bf16("mxfp4", target), "--verify"]) == 0
    assert capsys.readouterr().out.startswith("bit-equal: 144 expert weights packed again, ")


def test_a_full_disk_is_refused_before_the_first_byte(
    place: Path, in_place: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free space is the one thing that is made up here."""
    import shutil

    real: Callable[[Path], object] = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(real(path))(10**9, 10**9 - 1000, 1000))
    for arguments in (to_bf16("mxfp4", "new"), ["prune", "mxfp4", "new2", "--layers", "4"]):
        assert run(arguments) == INPUT_FAULT
        assert "GB are needed, 0.0 GB are free" in capsys.readouterr().err
    assert not list((place / "new").glob("*.safetensors"))
