"""`k31 verify-adapter`: everything that can be checked about a saved adapter, on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of the canary's log-probs, trainer against engine, by the model's dtype."""


class AdapterCheckError(ValueError):
    """An adapter that failed a check: names the check, the file and the two values."""


def verify_adapter(
    directory: Annotated[Path, typer.Argument(help="Adapter directory, e.g. runs/RUN/adapters/step-00005.")],
    recipe: Annotated[str | None, typer.Option(help="Recipe; the run's own when the directory lies in one.")] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint; the run's own when left out.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the canary sequence.")] = 32,
    files_only: Annotated[bool, typer.Option("--files-only", help="Only digests and finite values: no model.")] = False,
) -> None:
    """Check an adapter: digests, sizes, finite values, reload by the trainer, the same log-probs by the engine."""
    from k31core.checkpoint import commit as commits
    from k31core.checkpoint.adapter_digest import digest_of_file
    from k31core.checkpoint.finite import check_finite

    directory = directory.absolute()
    weights = directory / "adapter_model.safetensors"
    if not weights.is_file():
        raise AdapterCheckError(f"{weights} is missing: {directory} is not an adapter directory")
    if commits.is_committed(directory):
        manifest = commits.verify_directory(directory)
        print(f"files     {len(manifest['files'])} match the manifest {manifest['digest'][:16]}")
    else:
        print("files     no manifest: sizes and digests cannot be checked (this directory was not committed by a run)")
    check_finite(weights)
    digest = digest_of_file(weights)
    print(f"finite    every value; logical digest {digest[:16]}")
    if files_only:
        return
    resolved, checkpoint = _context(directory, recipe, model_dir)
    ours = _reload(resolved, checkpoint, directory, digest, tokens)
    theirs = _serve(resolved, checkpoint, directory, digest, len(ours) + 1)
    _compare(ours, theirs, TOLERANCE[resolved.recipe.model.dtype])


def _context(directory: Path, name: str | None, model_dir: Path | None) -> tuple[Any, Path]:
    """The resolved recipe with this adapter as its warm start, and the checkpoint directory."""
    from k31core.observe.jsonl import read_lines
    from k31core.recipe.load import load_recipe, override_recipe, read_resolved, resolve

    root = directory.parents[1]
    if name is None and not (root / "recipe.json").is_file():
        raise AdapterCheckError(f"{directory} does not lie in a run directory: give --recipe and --model-dir")
    base = load_recipe(name) if name else read_resolved(root / "recipe.json").recipe
    if model_dir is None:
        records, _ = read_lines(root / "ledger.jsonl")
        prepared = [r["outputs"]["model_dir"] for r in records if r["phase"] == "prepare"]
        if not prepared:
            raise AdapterCheckError(f"{root} does not say which checkpoint it used: give --model-dir")
        model_dir = Path(prepared[-1])
    layout = [f"train.parallel.{axis}=1" for axis in ("tp", "pp", "cp", "ep", "dp")]
    changes = [*layout, "train.backend=plain", f"train.lora.warm_start={directory}"]
    if base.train.device == "cuda":
        changes += ["cluster.num_nodes=1", "cluster.gpus_per_node=1"]
    return resolve(override_recipe(base, changes)), model_dir


def _canary(model_dir: Path, length: int) -> list[int]:
    import json

    config = json.loads((model_dir / "config.json").read_bytes())
    vocab = int(config.get("text_config", config)["vocab_size"])
    return [(7 * position + 3) % vocab for position in range(length)]


def _reload(resolved: Any, model_dir: Path, directory: Path, digest: str, length: int) -> list[float]:
    """Log-probs by the trainer with the adapter loaded; what it writes again must have the same digest."""
    import tempfile

    from k31core.workers.train import TrainWorker

    with tempfile.TemporaryDirectory() as scratch:  # the worker writes its signs of life there, not into the save
        worker = TrainWorker(resolved.recipe.model_dump_json(), scratch, str(model_dir), 0, 1, "")
        worker.start()
        worker.restore(None)
        out = Path(scratch) / "out"
        out.mkdir()
        written = worker.export(0, str(out), False)["adapter_digest"]
        if written != digest:
            raise AdapterCheckError(f"{directory} reloads as {written[:16]}, its file is {digest[:16]}")
        scores = worker.score(_canary(model_dir, length))
        worker.close()
    print(f"reload    the trainer loads it and writes {written[:16]} again")
    return scores


def _serve(resolved: Any, model_dir: Path, directory: Path, digest: str, length: int) -> list[float]:
    """Log-probs by the engine serving the adapter."""
    import asyncio

    from k31core.rollout.factory import build_engine

    async def serve() -> list[float]:
        engine = await build_engine(resolved, model_dir)
        try:
            served = await engine.load_adapter(directory, 1)
            if served != digest:
                raise AdapterCheckError(f"the engine serves {served[:16]}, {directory} holds {digest[:16]}")
            return list(await engine.score(tuple(_canary(model_dir, length))))
        finally:
            await engine.close()

    scores = asyncio.run(serve())
    print(f"engine    serves {digest[:16]}")
    return scores


def _compare(ours: list[float], theirs: list[float], tolerance: float) -> None:
    worst = max((abs(a - b) for a, b in zip(ours, theirs)), key=lambda d: (d != d, d))  # NaN is the worst
    if not worst <= tolerance:
        raise AdapterCheckError(
            f"canary: trainer and engine differ by {worst:.3g} in log-prob (limit {tolerance:g}) on {len(ours)} tokens"
        )
    print(f"canary    trainer and engine agree to {worst:.2g} on {len(ours)} tokens (limit {tolerance:g})")
