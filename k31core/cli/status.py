"""`k31 status`: services, runs, last steps."""

from pathlib import Path
from typing import Annotated, Any

import typer


def status(
    run: Annotated[str | None, typer.Argument(help="A run: show its ledger and last errors.")] = None,
    save_dir: Annotated[Path, typer.Option(help="Where run directories are.")] = Path("runs"),
) -> None:
    """Show which services run, which runs exist and where they stand. Reads only; needs no server."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    if run is not None:
        _show_run(console, save_dir.absolute() / Path(run).name)
        return
    _show_services(console)
    _show_runs(console, save_dir.absolute())


def _show_services(console: Any) -> None:
    from rich.table import Table

    from k31core.cluster.home import find_home, read_services
    from k31core.cluster.prefect_server import is_healthy
    from k31core.cluster.processes import is_alive, memory_pss_bytes
    from k31core.cluster.ray_head import is_listening

    home = find_home()
    services = read_services(home)
    answers = {
        "prefect": bool(services.prefect_url) and is_healthy(services.prefect_url or ""),
        "ray": bool(services.ray_address) and is_listening(services.ray_address or ""),
        "worker": any(map(is_alive, services.of("worker"))),
    }
    where = {"prefect": services.prefect_url, "ray": services.ray_address, "worker": "deployments k31/*"}
    table = Table("service", "state", "where", "memory (PSS)", title=f"services of {home.root}", title_justify="left")
    for name, answering in answers.items():
        state = "up" if answering else "down" if not services.of(name) else "not answering"
        memory = f"{memory_pss_bytes(services.of(name)) / 1024**2:.0f} MiB" if answering else ""
        table.add_row(name, state, (where[name] or "") if answering else "", memory)
    console.print(table)


def _show_runs(console: Any, save_dir: Path) -> None:
    from rich.table import Table

    from k31core.checkpoint.lock import holder
    from k31core.checkpoint.store import committed_steps, run_ids
    from k31core.observe.metrics import RAW_REWARD, read_metrics
    from k31core.recipe.load import read_resolved

    table = Table("run", "recipe", "step", "of", "last save", "reward", "state", title=f"runs in {save_dir}")
    table.title_justify = "left"
    for run_id in run_ids(save_dir):
        root = save_dir / run_id
        recipe = read_resolved(root / "recipe.json").recipe
        rows = read_metrics(root / "metrics.jsonl")
        saves = committed_steps(root / "adapters")
        reward = next((row[RAW_REWARD] for row in reversed(rows) if RAW_REWARD in row), None)
        table.add_row(
            run_id,
            recipe.name,
            str(rows[-1]["step"]) if rows else "-",
            str(recipe.num_rollout),
            str(saves[-1]) if saves else "-",
            "-" if reward is None else f"{reward:.3f}",
            _state(root, holder(root / "lock")),
        )
    console.print(table)


def _state(root: Path, who: str | None) -> str:
    from k31core.observe.jsonl import read_lines
    from k31core.observe.ledger import has_ended

    if who is not None:
        return f"running ({who})"
    records, _ = read_lines(root / "ledger.jsonl")
    if has_ended(records):
        return "ended"
    if records and records[-1]["phase"] == "watchdog":
        return "stopped by the watchdog"
    return f"unfinished: k31 resume {root.name}"


def _show_run(console: Any, root: Path) -> None:
    from rich.table import Table

    from k31core.checkpoint.lock import holder
    from k31core.checkpoint.store import StoreError, latest_valid_commit
    from k31core.observe.jsonl import read_lines

    if not (root / "recipe.json").is_file():
        raise StoreError(f"{root} is not a run directory")
    records, note = read_lines(root / "ledger.jsonl")
    table = Table("seq", "step", "phase", "seconds", "what", title=f"end of the ledger of {root.name}")
    for record in records[-12:]:
        what = {k: v for k, v in record["outputs"].items() if k not in ("metrics", "cursor")}
        text = ", ".join(f"{k} {v}" for k, v in what.items())
        table.add_row(str(record["seq"]), str(record["step"]), record["phase"], f"{record['seconds']:.2f}", text[:100])
    console.print(table)
    if note:
        console.print(note)
    search = latest_valid_commit(root)
    for directory, why in search.rejected:
        console.print(f"save {directory.name} is not valid: {why}")
    console.print(f"newest valid save: {search.commit.directory if search.commit else 'none'}")
    console.print(f"state: {_state(root, holder(root / 'lock'))}")
