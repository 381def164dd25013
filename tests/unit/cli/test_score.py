"""`k31 score` as a command: files in, files out, and input faults."""

import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from k31core.cli.score import ScoreInputError, score
from tests.model_cases import CASES, ReferenceModel, config_of, load_tensors, write_checkpoint

EXPECTED = CASES / "tiny-k31-expected.safetensors"


def run(*arguments: str | Path) -> None:
    app = typer.Typer()
    app.command()(score)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None:
        raise result.exception


@pytest.mark.parametrize(("extra", "key"), [((), "logits"), (("--adapter", CASES / "tiny-k31-adapter"), "logits_lora")])
def test_known_answers(tmp_path: Path, extra: tuple[str | Path, ...], key: str) -> None:
    expected = load_file(EXPECTED)
    tokens = expected["tokens"].tolist()
    (tmp_path / "tokens.json").write_text(json.dumps([tokens, tokens[:3], tokens[:1]]))
    out = tmp_path / "out.safetensors"
    run(CASES / "tiny-k31", "--tokens", tmp_path / "tokens.json", "--logits", "--out", out, *extra)
    got = load_file(out)
    assert set(got) == {f"{kind}.{i}" for kind in ("logprobs", "logits") for i in range(3)}
    assert all(t.dtype == torch.float32 for t in got.values())
    want = torch.log_softmax(expected[key], -1)[:-1].gather(1, expected["tokens"][1:, None])[:, 0]
    for number, length in enumerate((24, 3, 1)):
        assert torch.allclose(got[f"logits.{number}"], expected[key][:length], rtol=0, atol=1e-5)
        assert torch.allclose(got[f"logprobs.{number}"], want[: length - 1], rtol=0, atol=1e-5)


def test_k3_without_indexer_and_bf16(tmp_path: Path) -> None:
    raw = config_of(layers=3, mla=(2, 3), k31=False)
    directory = write_checkpoint(tmp_path / "model", raw)
    (tmp_path / "tokens.json").write_text(json.dumps([[4, 8, 15, 16, 23, 42]]))
    logits = ReferenceModel(raw, load_tensors(directory), None, 0.0).logits(torch.tensor([4, 8, 15, 16, 23, 42]))
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.2)):
        out = tmp_path / f"{dtype}.safetensors"
        run(directory, "--tokens", tmp_path / "tokens.json", "--logits", "--dtype", dtype, "--out", out)
        assert torch.allclose(load_file(out)["logits.0"].double(), logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1, 96]]", "sequence 0 has token 96; this vocabulary has 96"),
        ("[[1], []]", "sequence 1 must be a non-empty list"),
        ("[[1, 2.0]]", "position 1: 2.0 is no token id"),
        ("[1]", "sequence 0"),
        ("{}", "non-empty list of lists"),
        ("[", "not JSON"),
    ],
)
def test_bad_tokens(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(ScoreInputError, match=message):
        run(CASES / "tiny-k31", "--tokens", tmp_path / "tokens.json", "--out", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
