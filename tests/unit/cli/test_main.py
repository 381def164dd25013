"""The command line: quick help, clean errors, arguments."""

import ast
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k31core.cli import main as cli

ROOT = Path(__file__).parents[3]


def k31(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k31core.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd or ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    script = "import sys; from k31core.cli.main import run; run(['--help']); "
    script += (
        "heavy = {'torch', 'prefect', 'ray', 'numpy', 'pydantic', 'yaml'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=60)
    used = []
    for _ in range(3):  # processor time, so that a busy machine does not fail it: it waits for nothing
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert k31("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 1.0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_loads_and_has_help(name: str) -> None:
    module, _ = cli.COMMANDS[name]
    assert cli._exists(module), f"{name} is listed without its module {module}"
    command = cli.load(name)
    assert command.help, name
    tree = ast.parse((ROOT / "k31core" / "cli" / f"{module}.py").read_text())
    imports = {a.name.split(".")[0] for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    imports |= {(n.module or "").split(".")[0] for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert not imports & {"torch", "prefect", "ray", "transformers"}, "heavy imports belong inside the function"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "tyny"], ["unknown recipe 'tyny'", "Did you mean 'tiny'?"]),
        (["show", "tiny", "--set", "rollout.temperatur=1"], ["rollout.temperatur", "did you mean 'temperature'?"]),
        (["train", "--recipe", "tiny", "--set", "train.parallel.tp=0"], ["train.parallel.tp"]),
        (["train", "--resume", "gone"], ["gone is not a run directory"]),
        (["train", "--resume"], ["nothing to resume"]),
        (["train", "--save-dir", "/proc/nowhere"], ["cannot write the run directory", "--save-dir"]),
        (["status", "gone"], ["is not a run directory"]),
        (["verify-resume", "gone"], ["is not a run directory"]),
        (["verify-adapter", "gone"], ["is not an adapter directory"]),
    ],
)
def test_an_input_fault_is_one_clean_message_within_seconds(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    began = time.monotonic()
    done = k31(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr.replace("\n", " "), done.stderr
    assert time.monotonic() - began < 20


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = k31("show", "tyny", "--debug", cwd=tmp_path)
    assert "Traceback" in done.stderr and "RecipeError" in done.stderr


def test_a_bare_resume_means_the_newest_run() -> None:
    prepare = cli.prepare_arguments
    assert prepare(["train", "--resume"]) == (["train", "--resume", "latest"], False)
    assert prepare(["train", "--resume", "--set", "a=1"]) == (["train", "--resume", "latest", "--set", "a=1"], False)
    assert prepare(["train", "--resume", "r1", "--debug"]) == (["train", "--resume", "r1"], True)


def test_show_prints_what_a_run_freezes(tmp_path: Path) -> None:
    done = k31("show", "tiny", "--json", "--set", "rollout.temperature=0.8")
    assert '"temperature": 0.8' in done.stdout and '"candidate_mode": "support"' in done.stdout
    (tmp_path / "recipe.json").write_text(done.stdout)
    again = k31("show", str(tmp_path), "--json")
    assert again.stdout == done.stdout
