"""`k31 verify-adapter` on a save of a run: digests, finite values, reload, engine, canary."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k31core.checkpoint import commit as commits
from k31core.checkpoint.commit import CommitError
from k31core.checkpoint.finite import TensorFileError
from k31core.checkpoint.store import RunStore, create_run
from k31core.cli.verify_adapter import AdapterCheckError, _compare, verify_adapter
from k31core.observe.ledger import Phase
from k31core.recipe.load import load_recipe, resolve
from tests.unit.train.small_trainer import MODEL, OVERRIDES, rollout, small_trainer


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """The save after one step of a run on the known-answer checkpoint."""
    root = create_run(tmp_path, "run", resolve(load_recipe("tiny", OVERRIDES)))
    trainer = small_trainer()
    trainer.train(rollout(trainer, 0))
    with RunStore(root) as store, store.save_staging(1) as staging:
        store.ledger.append(Phase.PREPARE, 0, outputs={"model_dir": str(MODEL)})
        trainer.export(staging, optimizer=True)
        return store.save_adapter(staging, 1, {}).directory


def check(directory: Path, *, files_only: bool = False) -> None:
    verify_adapter(directory, recipe=None, model_dir=None, tokens=12, files_only=files_only)


def test_a_good_save_passes_every_check(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(save)
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["files", "finite", "reload", "engine", "canary"]
    assert "5 match the manifest" in said
    check(save, files_only=True)  # and nothing was written into it


def test_damage_is_named_before_a_model_is_loaded(save: Path, tmp_path: Path) -> None:
    weights = save / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CommitError, match=r"adapter_model\.safetensors has another digest than the manifest"):
        check(save)
    weights.write_bytes(whole)
    (save / commits.MANIFEST).unlink()  # an adapter from elsewhere: no digests, but still finite values
    tensors = load_file(weights)
    name = sorted(tensors)[3]
    tensors[name].flat[5] = np.nan
    save_file(tensors, weights)
    with pytest.raises(TensorFileError, match=f"tensor {name} holds NaN"):
        check(save)
    with pytest.raises(AdapterCheckError, match="is not an adapter directory"):
        check(tmp_path / "nothing")


def test_a_canary_that_differs_is_refused() -> None:
    with pytest.raises(AdapterCheckError, match=r"differ by 0\.5 in log-prob \(limit 0\.0001\)"):
        _compare([-1.0, -2.0], [-1.0, -2.5], 1e-4)
    with pytest.raises(AdapterCheckError, match="differ by nan"):
        _compare([-1.0, float("nan")], [-1.0, -2.5], 1e-4)
