"""The checks that `tests/gpu/run_sglang.py` makes on a card, with the stand-in and on the CPU: they run, and a trainer
that disagrees is found."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from tests.gpu.sglang_checks import (
    CHECKS,
    check_logprobs,
    open_pair,
    recipe_for,
    run_checks,
    write_adapter,
    write_model,
)
from tests.gpu.sglang_patches import PATCHES, PatchError, apply
from tests.unit.sglang.test_sglang_versions import K3_LORA, write_tree

ROOT = Path(__file__).parents[3]


def site_of_standin(root: Path) -> Path:
    """A folder whose `sglang.launch_server` is the stand-in."""
    tree = Path(write_tree(root / "tree", "0.5.17", K3_LORA, lora=""))
    (tree / "sglang" / "__init__.py").write_text("")
    launch = "from tests.sglang_standin.server import command_line\nif __name__ == '__main__':\n    command_line()\n"
    (tree / "sglang" / "launch_server.py").write_text(launch)
    return tree


def test_every_check_passes_with_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] % 30000 + 20000
    recipe = recipe_for(
        site_of_standin(tmp_path),
        card=False,
        port=port,
        overrides=("env.variables.K31_STANDIN_ALPHA='16'", "env.variables.K31_STANDIN_TARGETS='experts'"),
    )

    async def main() -> None:
        model = write_model(tmp_path / "model", small=True)
        pair = await open_pair(recipe, model, tmp_path / "scratch", tolerance=1e-4)
        said: list[str] = []
        try:
            found = await run_checks(pair, said.append)
            assert {name: check["ok"] for name, check in found.items()} == {name: True for name, _ in CHECKS}, found
            assert found["publish-by-handle"]["effect"] > 0.01
            pair.trainer.restore(str(write_adapter(tmp_path / "other", model, seed=99)))
            with pytest.raises(AssertionError, match=r"above 0\.0001"):
                await check_logprobs(pair)
        finally:
            await pair.engine.close()
            pair.trainer.close()
        assert len(said) == len(CHECKS)

    asyncio.run(main())


def test_patches_find_their_places_once_and_only_once(tmp_path: Path) -> None:
    for patch in PATCHES:
        path = tmp_path / patch.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.is_file() else "# kept\n") + patch.old + "\n")
    assert len(apply(tmp_path)) == len(PATCHES)
    assert apply(tmp_path) == []
    for patch in PATCHES:
        assert patch.new in (tmp_path / patch.file).read_text()
    first = tmp_path / PATCHES[0].file
    first.write_text("nothing of it")
    with pytest.raises(PatchError, match="is there 0 times, expected once"):
        apply(tmp_path)
