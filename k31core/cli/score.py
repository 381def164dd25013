"""`k31 score`: log-probs (and logits) of fixed token sequences by the trainer's model; the check after a load or a
sync."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    import torch

    from k31core.model.decoder import Decoder

_ROWS = 1024
"""Tokens whose logits exist at a time, unless they are written."""


class ScoreInputError(ValueError):
    """A tokens file that is not a list of lists of token ids: names the file, the sequence and the value."""


def score(
    model_dir: Annotated[Path, typer.Argument(help="checkpoint directory in the native layout")],
    tokens: Annotated[Path, typer.Option(help="JSON file: a list of lists of token ids")],
    out: Annotated[
        Path, typer.Option(help="safetensors file to write: logprobs.{i} [n-1] and logits.{i} [n, V], fp32")
    ],
    adapter: Annotated[Path | None, typer.Option(help="adapter directory (adapter_config.json and weights)")] = None,
    logits: Annotated[bool, typer.Option("--logits", help="write the logits too")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(
            help="of weights and activations; on a CPU float32 adds in float64, so the result is exact to fp32"
        ),
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one")] = "auto",
) -> None:
    """Score fixed token sequences with the trainer's model."""
    from k31core.checkpoint.tensor_file import write_tensor_file

    sequences = read_sequences(tokens)
    if not out.parent.is_dir():
        raise ScoreInputError(f"--out {out}: the directory {out.parent} does not exist")
    decoder = load_decoder(model_dir, adapter, dtype=dtype, device=device)
    scored = score_sequences(decoder, sequences, str(tokens), logits=logits)
    partial = out.with_name(out.name + ".partial")
    write_tensor_file(partial, scored)
    partial.rename(out)
    total = sum(len(sequence) for sequence in sequences)
    typer.echo(f"{len(sequences)} sequences, {total} tokens -> {out}")


def read_sequences(path: Path) -> list[list[int]]:
    """The token lists of FILE.json; raises `ScoreInputError` naming the sequence and the value."""
    import json

    if not path.is_file():
        raise ScoreInputError(f"--tokens {path}: no such file")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ScoreInputError(f"--tokens {path}: not JSON ({error})") from error
    if not isinstance(raw, list) or not raw:
        raise ScoreInputError(f"--tokens {path}: expected a non-empty list of lists of token ids")
    for number, sequence in enumerate(raw):
        if not isinstance(sequence, list) or not sequence:
            raise ScoreInputError(f"--tokens {path}: sequence {number} must be a non-empty list of token ids")
        for position, token in enumerate(sequence):
            if type(token) is not int:
                raise ScoreInputError(
                    f"--tokens {path}: sequence {number}, position {position}: {token!r} is no token id"
                )
    return raw


def load_decoder(model_dir: Path, adapter: Path | None, *, dtype: str, device: str) -> "Decoder":
    """The whole decoder of a checkpoint, with the adapter's bypass when one is given."""
    import torch

    from k31core.checkpoint.adapter import load_adapter, read_adapter_config
    from k31core.checkpoint.native import NativeCheckpoint
    from k31core.model.build import LORA_TARGETS, Build, LoraSpec
    from k31core.model.config import load_config
    from k31core.model.decoder import Decoder
    from k31core.model.weight_names import IGNORED_PREFIXES, adapter_slots, base_slots, expected_names

    config = load_config(model_dir)
    lora = None
    if adapter is not None:
        settings = read_adapter_config(adapter)
        lora = LoraSpec(settings.rank, settings.alpha, settings.targets or LORA_TARGETS)
    checkpoint = NativeCheckpoint(model_dir)
    checkpoint.check_names(expected_names(config), IGNORED_PREFIXES)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    decoder = Decoder(config, Build(dtype=_arithmetic(dtype, place), device=place, lora=lora))
    checkpoint.load(base_slots(decoder))
    if adapter is not None:
        load_adapter(adapter, adapter_slots(decoder))
    return decoder


def score_sequences(
    decoder: "Decoder", sequences: list[list[int]], where: str, *, logits: bool
) -> "dict[str, torch.Tensor]":
    """`logprobs.{i}` `[n - 1]` (token j + 1 given tokens 0..j) and, when asked, `logits.{i}` `[n, V]`; fp32 on CPU."""
    import torch

    from k31core.model.decoder import Packed

    vocab, place = decoder.config.vocab_size, decoder.build.device
    for number, sequence in enumerate(sequences):
        if not 0 <= min(sequence) <= max(sequence) < vocab:
            worst = next(token for token in sequence if not 0 <= token < vocab)
            raise ScoreInputError(f"{where}: sequence {number} has token {worst}; this vocabulary has {vocab} entries")
    scored: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for number, sequence in enumerate(sequences):
            ids = torch.tensor(sequence, device=place)
            hidden = decoder(Packed(ids, torch.tensor([0, len(sequence)], device=place)))
            chosen, kept = [], []
            for start in range(0, len(sequence), _ROWS):
                rows = decoder.logits(hidden[start : start + _ROWS])
                labels = ids[start + 1 : start + _ROWS + 1, None]
                chosen.append(torch.log_softmax(rows[: len(labels)], dim=-1).gather(1, labels)[:, 0])
                if logits:
                    kept.append(rows.to(torch.float32).cpu())
            scored[f"logprobs.{number}"] = torch.cat(chosen).to(torch.float32).cpu()
            if logits:
                scored[f"logits.{number}"] = torch.cat(kept)
    return scored


def _arithmetic(dtype: str, device: "torch.device") -> "torch.dtype":
    import torch

    if dtype == "bfloat16":
        return torch.bfloat16
    # The logits of a random checkpoint move by 5e-5 when one fp32 rounding changes: a CPU has the time to be exact.
    return torch.float64 if device.type == "cpu" else torch.float32
