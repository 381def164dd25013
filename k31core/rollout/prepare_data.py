"""Makes the prepared file of a split: rows checked, duplicates and long prompts handled, prompts tokenised. No torch.

The directory's name is a digest of everything its content depends on, so the same sources, tokenizer and settings find
the same directory again, and another setting never meets an old file.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np

from k31core.rollout.data import COLUMNS_FILE, MANIFEST_FILE, PreparedSplit
from k31core.rollout.dataset_file import DataError, Row, read_rows, source_files
from k31core.rollout.tokenizer import TokenizerError, load_tokenizer

FORMAT = 1
"""Raise when the prepared file or the meaning of a setting changes."""
_LISTED = 10
"""Rows that an error or a report names; the rest is counted."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """What decides the content of a prepared split, besides its sources and the tokenizer."""

    split: str
    max_prompt_tokens: int
    duplicates: Literal["refuse", "drop", "keep"] = "drop"
    too_long: Literal["refuse", "drop"] = "refuse"
    thinking_effort: str | None = None
    """Given to the chat template; None leaves it to the template's default."""


@dataclass(slots=True)
class PrepareReport:
    """What happened to the rows: goes into the manifest, word for word."""

    rows: int = 0
    duplicates: int = 0
    """Rows whose messages were seen before."""
    conflicting_labels: list[str] = field(default_factory=list)
    """Duplicates with another label than the first one (the first is kept): `place (label a, first b)`."""
    too_long: int = 0
    too_long_rows: list[str] = field(default_factory=list)
    """The first of them: `place (tokens)`."""
    longest_prompt_tokens: int = 0


Encode = Callable[[list[dict[str, str]]], list[int]]


def prepare_split(
    source: Path,
    model_dir: Path,
    out_dir: Path,
    settings: PrepareSettings,
    *,
    name: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """The directory `name` (else `<split>-<digest>`) under `out_dir` with the prepared split; made unless it is there.

    Raises DataError for any bad row, for duplicates or long prompts that the settings refuse, for an empty result, and
    for a tokenizer without a chat template.
    """
    digest = content_digest(source, model_dir, settings)
    final = out_dir / (name or f"{settings.split}-{digest[:16]}")
    if _holds(final, digest):
        return final
    encode = chat_encoder(model_dir, settings.thinking_effort, trust_remote_code=trust_remote_code)
    report = PrepareReport()
    rows = _unique(read_rows(source, settings.split), settings, report, source)
    kept, tokens = _encoded(rows, encode, settings, report, source)
    _write(final, digest, kept, tokens, settings, report)
    return final


def _holds(directory: Path, digest: str) -> bool:
    """Whether a prepared split of this content is there, byte for byte."""
    try:
        split = PreparedSplit.open(directory)
    except DataError:
        return False
    recorded = [entry.get("sha256") for entry in split.manifest.get("files", [])]
    return split.manifest.get("digest") == digest and recorded == [_sha256(directory / COLUMNS_FILE)]


def content_digest(source: Path, model_dir: Path, settings: PrepareSettings) -> str:
    """SHA-256 over the format, the settings, the bytes of the source files and the tokenizer."""
    files = source_files(source, settings.split)
    found = sorted(
        {p for name in _TOKENIZER_FILES if (p := model_dir / name).is_file()} | set(model_dir.glob("*.tiktoken"))
    )
    content = {
        "format": FORMAT,
        "settings": {name: getattr(settings, name) for name in settings.__slots__},
        "files": [_sha256(file) for file in files],
        "tokenizer": {file.name: _sha256(file) for file in found},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def chat_encoder(model_dir: Path, thinking_effort: str | None, *, trust_remote_code: bool = False) -> Encode:
    """Messages to token ids with the tokenizer's own chat template, generation prompt included. Raises DataError."""
    try:
        tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    except TokenizerError as error:
        raise DataError(str(error)) from error
    if not tokenizer.chat_template and type(tokenizer).apply_chat_template is _plain_apply():
        raise DataError(
            f"{model_dir}: the tokenizer has no chat template (no `chat_template` in tokenizer_config.json and no "
            "chat_template.jinja): prompts are chat messages; use an instruction-tuned checkpoint or add the template"
        )
    extra = {} if thinking_effort is None else {"thinking_effort": thinking_effort}

    def encode(messages: list[dict[str, str]]) -> list[int]:
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False, **extra
        )
        return [int(token) for token in ids]

    return encode


def _plain_apply() -> Any:
    """transformers' own `apply_chat_template`: a tokenizer with its own needs no template in a file."""
    from transformers import PreTrainedTokenizerBase

    return PreTrainedTokenizerBase.apply_chat_template


def _unique(rows: Iterable[Row], settings: PrepareSettings, report: PrepareReport, source: Path) -> Iterable[Row]:
    """Rows without exact duplicates by prompt, as the settings say; everything is counted."""
    first: dict[bytes, tuple[str, str]] = {}
    for row in rows:
        report.rows += 1
        key = hashlib.sha256(_messages_json(row)).digest()
        if key not in first:
            first[key] = (row.label, row.place)
        else:
            label, place = first[key]
            report.duplicates += 1
            if settings.duplicates == "refuse":
                raise DataError(
                    f"{row.place}: the same prompt as {place}; set the data set's `duplicates` to 'drop' (the first "
                    "one stays) or 'keep'"
                )
            if label != row.label and len(report.conflicting_labels) < _LISTED:
                report.conflicting_labels.append(f"{row.place} (label {row.label!r}, first {label!r})")
            if settings.duplicates == "drop":
                continue
        yield row


def _encoded(
    rows: Iterable[Row], encode: Encode, settings: PrepareSettings, report: PrepareReport, source: Path
) -> tuple[list[Row], list[list[int]]]:
    kept: list[Row] = []
    tokens: list[list[int]] = []
    for row in rows:
        try:
            ids = encode(_messages(row))
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise DataError(f"{row.place}: the chat template refuses this prompt ({error})") from error
        if not ids:
            raise DataError(f"{row.place}: the chat template makes no tokens of this prompt")
        if len(ids) > settings.max_prompt_tokens:
            report.too_long += 1
            if len(report.too_long_rows) < _LISTED:
                report.too_long_rows.append(f"{row.place} ({len(ids)} tokens)")
            continue
        report.longest_prompt_tokens = max(report.longest_prompt_tokens, len(ids))
        kept.append(row)
        tokens.append(ids)
    if report.too_long and settings.too_long == "refuse":
        more = f" and {report.too_long - _LISTED} more" if report.too_long > _LISTED else ""
        raise DataError(
            f"{source}: {report.too_long} prompts are longer than data.max_prompt_tokens {settings.max_prompt_tokens}: "
            f"{'; '.join(report.too_long_rows)}{more}; raise the limit or set the data set's `too_long` to 'drop'"
        )
    if not kept:
        raise DataError(f"{source}: no prompt is left of {report.rows} rows ({report.too_long} too long)")
    return kept, tokens


def _messages(row: Row) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in row.messages]


def _messages_json(row: Row) -> bytes:
    return json.dumps(_messages(row), ensure_ascii=False, separators=(",", ":")).encode()


def _write(
    final: Path, digest: str, rows: list[Row], tokens: list[list[int]], settings: PrepareSettings, report: PrepareReport
) -> None:
    """Columns and manifest into a new directory that gets its name when it is whole."""
    messages = [_messages_json(row) for row in rows]
    labels = [row.label.encode() for row in rows]
    contents = [message + b"\0" + label for message, label in zip(messages, labels, strict=True)]
    copies: Counter[bytes] = Counter()
    ids = []
    for content in contents:
        copy = str(copies[content]).encode() if copies[content] else b""
        copies[content] += 1
        ids.append(hashlib.sha256(content + copy).digest()[:16])
    columns: dict[str, np.ndarray[Any, Any]] = {
        "tokens": np.fromiter((token for ids_ in tokens for token in ids_), dtype=np.int32),
        "token_starts": _starts(tokens),
        "labels": np.frombuffer(b"".join(labels), dtype=np.uint8),
        "label_starts": _starts(labels),
        "messages": np.frombuffer(b"".join(messages), dtype=np.uint8),
        "message_starts": _starts(messages),
        "ids": np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, 16),
    }
    staging = final.with_name(f".{final.name}-{uuid.uuid4().hex[:8]}")
    try:
        staging.mkdir(parents=True)
        _write_columns(columns, staging / COLUMNS_FILE)
        manifest = {
            "format": FORMAT,
            "digest": digest,
            "prompts": len(rows),
            "settings": {name: getattr(settings, name) for name in settings.__slots__},
            "report": {name: getattr(report, name) for name in report.__slots__},
            "files": [{"path": COLUMNS_FILE, "size": (staging / COLUMNS_FILE).stat().st_size,
                       "sha256": _sha256(staging / COLUMNS_FILE)}],
        }  # fmt: skip
        (staging / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        _sync(staging)
        if not _holds(final, digest):  # else another process was faster
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
    except OSError as error:
        needed = sum(column.nbytes for column in columns.values())
        raise DataError(
            f"{final}: the prepared data set of {needed / 1e6:.1f} MB cannot be written ({error}); free some space, or "
            "set K31_DATA_DIR to a disk that has it"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_columns(columns: dict[str, np.ndarray[Any, Any]], path: Path) -> None:
    """The columns as one safetensors file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(columns, path)
    except SafetensorError as error:  # its own way to say that the file cannot be written
        raise OSError(str(error)) from error


def _starts(parts: list[Any]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def _sync(directory: Path) -> None:
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
