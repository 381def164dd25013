"""The `k31` command. Commands are imported when they are called, so that `k31 --help` answers at once."""

import importlib
import os
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train", "Train a recipe: start services, prepare, run the loop, report."),
    "resume": ("resume", "Continue a run from its newest valid commit."),
    "up": ("up", "Start the local services and serve the deployments."),
    "down": ("down", "Stop everything that k31 started."),
    "status": ("status", "Show services, runs and their last steps."),
    "doctor": ("doctor", "Say what is missing on this machine, and how to get it."),
    "recipes": ("recipes", "List the shipped recipes."),
    "show": ("show", "Print a resolved recipe."),
    "plan": ("plan", "What a recipe needs on every rank: bytes, shapes, what will not fit."),
    "score": ("score", "Log-probs of fixed token sequences: the check after a load or a sync."),
    "grade": ("grade", "Grade answers with both graders."),
    "eval": ("eval", "Evaluate an adapter on a held-out set."),
    "report": ("report", "Draw the report of a run."),
    "verify-model": ("verify_model", "Check a checkpoint directory file by file."),
    "verify-adapter": ("verify_adapter", "Check an adapter: digests, finite, reload, canary, engine."),
    "verify-resume": ("verify_resume", "Prove on this machine that a killed run ends in the same bytes."),
    "convert": ("convert", "Convert a checkpoint."),
    "prune": ("prune", "Cut a checkpoint to a few layers."),
    "export": ("export", "Export an adapter to PEFT-style files."),
    "import-adapter": ("import_adapter", "Read an adapter from PEFT-style files."),
}
"""Command name -> (module under `k31core.cli` and its function of the same name, one line of help)."""

OURS = ("k31core.", "tasks.", "flows.")
INPUT_FAULT, FAULT = 2, 1


class LazyGroup(TyperGroup):
    """A command group that knows names and one-line helps without importing any command."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of `COMMANDS`, those whose module is there."""
        return [name for name, (module, _) in COMMANDS.items() if _exists(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stub with the one-line help: enough for the list."""
        if cmd_name not in self.list_commands(ctx):
            return None
        stub = typer.Typer(add_completion=False)
        stub.command(cmd_name, help=COMMANDS[cmd_name][1])(_nothing)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command: its module is imported here."""
        name, stub, rest = super().resolve_command(ctx, args)
        return (name, load(name), rest) if name is not None else (name, stub, rest)


def _nothing() -> None:
    """Never called."""


def _exists(module: str) -> bool:
    return os.path.exists(os.path.join(os.path.dirname(__file__), f"{module}.py"))


def load(name: str) -> Any:
    """Import a command and make it callable."""
    module = COMMANDS[name][0]
    function = getattr(importlib.import_module(f"k31core.cli.{module}"), module)
    if isinstance(function, typer.Typer):  # a command with commands of its own
        return typer.main.get_command(function)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(function)
    return typer.main.get_command(app)


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """RL-train LoRA adapters of Kimi-K3.1 on its MXFP4 experts as published.

    Every command has its own --help; --debug anywhere shows tracebacks.
    """


def main() -> None:
    """Entry point of the `k31` script."""
    arguments, debug = prepare_arguments(sys.argv[1:])
    if not debug:  # at import megatron-core warns of every optional package that is not there
        warnings.filterwarnings("ignore", module=r".*\bmegatron.core\b")
    sys.exit(run(arguments, debug=debug))


def prepare_arguments(arguments: list[str]) -> tuple[list[str], bool]:
    """Take out `--debug`, and give a bare `--resume` its value `latest`."""
    debug = "--debug" in arguments
    kept = [argument for argument in arguments if argument != "--debug"]
    result: list[str] = []
    for index, argument in enumerate(kept):
        result.append(argument)
        bare = index + 1 == len(kept) or kept[index + 1].startswith("-")
        if argument == "--resume" and bare:
            result.append("latest")
    return result, debug


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run a command; returns the exit code. Our own errors are one clean message, others a traceback."""
    try:
        code = app(args=arguments, prog_name="k31", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return int(leave.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error of the command line itself
            error.show()
            return int(error.exit_code)
        if debug or not type(error).__module__.startswith(OURS):
            raise
        print_error(str(error))
        return INPUT_FAULT if isinstance(error, ValueError) else FAULT


def print_error(message: str) -> None:
    """One red message on standard error."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="bold red"))


def print_note(message: str) -> None:
    """One line on standard error, so that standard output holds only what a script wants to read."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
