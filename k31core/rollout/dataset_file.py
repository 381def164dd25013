"""Reads the rows of a data set and checks every one of them. No torch.

A row is `{"prompt": [{"role": "user", "content": "..."}, ...], "label": "34"}`, as in dapo-math-17k; other fields are
ignored. Rows come from `.jsonl` files, `.parquet` files, a folder of those, or a folder written by `datasets`
(`save_to_disk`). A row that is not like that ends the reading with its file and line; nothing is skipped.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPLITS = ("train", "test", "validation", "valid", "dev", "heldout", "eval")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class DataError(ValueError):
    """A data set that cannot be used: names file and line (or row), the value seen, and what to change."""


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row."""

    messages: tuple[tuple[str, str], ...]
    """(role, content), the last one by the user."""
    label: str
    place: str
    """`file:line` (jsonl, from 1) or `file, row n` (columnar files, from 0)."""


def read_rows(path: Path, split: str) -> Iterator[Row]:
    """Every row of the split. Raises DataError at the first bad one, and when there is none at all."""
    found = False
    for row in _rows(path, split):
        found = True
        yield row
    if not found:
        raise DataError(f"{path}: the data set has no row in split {split!r}; at least one prompt is needed")


def source_files(path: Path, split: str) -> list[Path]:
    """The files that hold the split, sorted: what a digest of the data set is made from."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; put the data set there or set the recipe's data path")
    if path.is_file():
        return [path]
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        folder = path / split if (path / "dataset_dict.json").is_file() else path
        if not folder.is_dir():
            raise DataError(f"{path}: no split {split!r} in this folder written by `datasets`")
        return sorted(file for file in folder.iterdir() if file.suffix in {".arrow", ".json"})
    files = sorted(f for f in path.rglob("*") if f.suffix in {".jsonl", ".parquet"} and not _hidden(f, path))
    named = [file for file in files if _names_split(file.relative_to(path), split)]
    other = [file for file in files if any(_names_split(file.relative_to(path), name) for name in _SPLITS)]
    if named or (files and not other):
        return named or files
    names = ", ".join(str(file.relative_to(path)) for file in files[:8]) or "no .jsonl or .parquet file at all"
    raise DataError(f"{path}: no file of split {split!r} (found {names}); name the split or the file in the recipe")


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _names_split(relative: Path, split: str) -> bool:
    return re.search(rf"(^|[-_./]){re.escape(split)}([-_./]|$)", str(relative)) is not None


def _rows(path: Path, split: str) -> Iterator[Row]:
    for file in source_files(path, split):
        if file.suffix == ".jsonl":
            yield from _jsonl_rows(file)
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file)
        elif file.suffix == ".arrow":
            yield from _arrow_rows(file)
        elif file.suffix != ".json" or path.is_file():
            raise DataError(f"{file}: unknown kind of file; use .jsonl or .parquet")


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file}:{number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place}: invalid UTF-8 at byte {error.start} of the line; write the file again as UTF-8"
                ) from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise DataError(f"{place}: not a JSON object ({_short(error)}); every line must be one") from error
            yield check_row(record, place)


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        table = pyarrow.parquet.ParquetFile(file)
        missing = {"prompt", "label"} - set(table.schema_arrow.names)
        if missing:
            raise DataError(_missing(file, missing, table.schema_arrow.names))
        batches = table.iter_batches(batch_size=8192, columns=["prompt", "label"])
        yield from _batch_rows(batches, file)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a readable parquet file ({_short(error)}); download it again") from error


def _arrow_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.ipc  # type: ignore[import-untyped]

    try:
        with pyarrow.memory_map(str(file)) as source:
            stream = pyarrow.ipc.open_stream(source)
            missing = {"prompt", "label"} - set(stream.schema.names)
            if missing:
                raise DataError(_missing(file, missing, stream.schema.names))
            yield from _batch_rows((batch.select(["prompt", "label"]) for batch in stream), file)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a readable Arrow file of `datasets` ({_short(error)})") from error


def _batch_rows(batches: Iterator[Any], file: Path) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for record in _python_values(batch, file, number):
            yield check_row(record, f"{file}, row {number}")
            number += 1


def _python_values(batch: Any, file: Path, first: int) -> list[dict[str, Any]]:
    """The rows of an Arrow batch; a row with invalid UTF-8 is named."""
    try:
        values: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for offset in range(batch.num_rows):
            try:
                batch.slice(offset, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, row {first + offset}: invalid UTF-8; write the file again as UTF-8"
                ) from error
        raise
    return values


def _missing(file: Path, missing: set[str], names: list[str]) -> str:
    return f"{file}: no column {sorted(missing)} (it has {names[:10]}); rows need `prompt` and `label`"


def check_row(record: Any, place: str) -> Row:
    """The checked row. Raises DataError that names `place`."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: a row is {_kind(record)}, expected an object with `prompt` and `label`")
    for field in ("prompt", "label"):
        if field not in record:
            raise DataError(f"{place}: no field `{field}` (it has {sorted(map(str, record))[:10]})")
    label, prompt = record["label"], record["prompt"]
    if not isinstance(label, str):
        raise DataError(f'{place}: `label` is {_kind(label)} {_short(label)}, expected a string such as "34"')
    if not label.strip():
        raise DataError(f"{place}: `label` is empty: no answer could be right; remove the row or give its answer")
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place}: `prompt` is {_kind(prompt)}, expected a list of chat messages that is not empty")
    messages = tuple(_check_message(message, index, place) for index, message in enumerate(prompt))
    if messages[-1][0] != "user":
        raise DataError(f"{place}: the last message of `prompt` is by {messages[-1][0]!r}, expected 'user'")
    for text in (label, *(content for _, content in messages)):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: a lone surrogate (half a character) in {_short(text)}; repair the text"
            ) from error
    return Row(messages, label, place)


def _check_message(message: Any, index: int, place: str) -> tuple[str, str]:
    where = f"{place}: message {index} of `prompt`"
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_kind(message)}, expected an object with `role` and `content`")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise DataError(f"{where} has role {_short(role)}, expected one of {sorted(_ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where} has `content` {_kind(content)}, expected a string")
    if not content.strip():
        raise DataError(f"{where} has empty `content`")
    return str(role), content


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
