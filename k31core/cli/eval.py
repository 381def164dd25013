"""`k31 eval`: a save of a run on its held-out set, or on any other data set."""

from pathlib import Path
from typing import Annotated

import typer


def eval(  # noqa: PLR0913 - the options of the command
    run: Annotated[str, typer.Argument(help="Run name or directory; `latest` is the newest run with a save.")] = (
        "latest"
    ),
    data: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl or .parquet file, a folder of those or one written by `datasets`, or owner/name on "
            "the Hub; the recipe's held-out set when left out."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Evaluate this save, not the newest; 0: before the first step.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--n-samples-per-eval-prompt", min=1, help="Answers to each prompt, for pass@k.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "--eval-temperature", min=0.0, help="0 is greedy: one answer to each prompt."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Metrics are eval/NAME; else after the data.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data (default: train).")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a data set on the Hub.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, for this evaluation only.")] = None,
    save_dir: Annotated[Path, typer.Option(help="Where run directories are.")] = Path("runs"),
) -> None:
    """Serve a save of a run and evaluate it: accuracy, pass@k, truncation and format rates as eval/NAME...

    The run itself stays as it is. A table of every problem with its graded answers is kept under eval/ in the run
    directory, and its start is an artifact of the flow run.
    """
    from k31core.cli.eval_session import Evaluation, run_evaluation
    from k31core.recipe.eval_request import EvalRequest

    options = {
        "eval.name": name,
        "data.heldout.split": split,
        "data.heldout.revision": revision,
        "eval.max_prompts": max_prompts,
    }
    overrides = [f"{field}={value}" for field, value in options.items() if value is not None]
    wanted = EvalRequest(data, step, samples, temperature, (*overrides, *(set_ or ())))
    raise typer.Exit(run_evaluation(Evaluation(run, save_dir.absolute(), wanted)))
