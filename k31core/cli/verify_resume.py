"""`k31 verify-resume`: prove on this machine that a killed run ends in the same bytes as one that was left alone."""

from pathlib import Path
from typing import Annotated

import typer


def verify_resume(
    run: Annotated[Path, typer.Argument(help="Run directory whose recipe is used; it is not changed.")],
    steps: Annotated[int, typer.Option(help="Steps of the two runs.")] = 6,
    kills: Annotated[int, typer.Option(help="Kills in the second run, spread over its steps.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses the targets and the moments.")] = 0,
    target: Annotated[list[str] | None, typer.Option(help="Kill only these: flow, engine, trainer, prefect.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each of the two runs.")] = 1800.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the two runs for a look.")] = False,
) -> None:
    """Run the recipe twice, once in one go and once with kill -9, and compare the ends byte by byte.

    Compares adapter, optimizer and trainer state, all metrics apart from times and memory, and the prompt ledger.
    Starts local services where none is running. Exact on a CPU; on a GPU small differences are expected.
    """
    import json
    import shutil

    from k31core.checkpoint.store import StoreError
    from k31core.cli.chaos import TARGETS, Chaos, ChaosError, differences
    from k31core.cli.main import print_note
    from k31core.cluster.home import find_home
    from k31core.recipe.load import override_recipe, read_resolved

    if not (run / "recipe.json").is_file():
        raise StoreError(f"{run} is not a run directory (no recipe.json)")
    changes = [f"num_rollout={steps}", "observe.wandb=false"]
    recipe = override_recipe(read_resolved(run / "recipe.json").recipe, changes)
    scratch = run.absolute().parent / f".verify-{run.absolute().name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    file = scratch / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json")))  # JSON is YAML
    home, arguments = find_home(), ["--recipe", str(file)]
    print_note(f"1 of 2: {steps} steps in one go")
    whole = Chaos(scratch / "whole", home, seed=seed)
    whole.run(arguments, kills=0, timeout_s=timeout, say=print_note)
    print_note(f"2 of 2: {steps} steps with {kills} kills")
    killed = Chaos(scratch / "killed", home, seed=seed, targets=target or TARGETS)
    done = killed.run(arguments, kills=kills, timeout_s=timeout, say=print_note, over_steps=steps)
    found = differences(whole.root, killed.root)
    if found:
        raise ChaosError(f"{len(found)} differences (runs kept in {scratch}):\n" + "\n".join(found[:20]))
    print(f"same bytes after {len(done)} kills: {', '.join(f'{k.target} (step {k.step})' for k in done)}")
    if not keep:
        shutil.rmtree(scratch)
