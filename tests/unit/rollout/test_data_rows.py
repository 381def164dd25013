"""Reading a data set: every kind of source, and every kind of bad row with its place in the error."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from k31core.rollout.dataset_file import DataError, read_rows, source_files


def row(question: str = "1+1=", label: Any = "2") -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "label": label}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_every_source_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = [row(f"{n}+1=", str(n + 1)) for n in range(20)]
    jsonl = write_jsonl(tmp_path / "a" / "rows.jsonl", rows)
    parquet = write_parquet(tmp_path / "b" / "rows.parquet", rows)
    write_parquet(tmp_path / "c" / "data" / "train-00000-of-00002.parquet", rows[:9])
    write_parquet(tmp_path / "c" / "data" / "train-00001-of-00002.parquet", rows[9:])
    write_parquet(tmp_path / "c" / "data" / "test-00000-of-00001.parquet", rows[:1])
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "e"))
    expected = [((("user", f"{n}+1="),), str(n + 1)) for n in range(20)]
    for source in (jsonl, tmp_path / "a", parquet, tmp_path / "b", tmp_path / "c", tmp_path / "d", tmp_path / "e"):
        assert [(r.messages, r.label) for r in read_rows(source, "train")] == expected, source
    assert len(list(read_rows(tmp_path / "c", "test"))) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": row()["prompt"]}, "no field `label`"),
        ({"label": "2"}, "no field `prompt`"),
        (row(label=34), "`label` is of type int 34, expected a string"),
        (row(label=None), "`label` is null"),
        (row(label=["2"]), "`label` is of type list"),
        (row(label=" "), "`label` is empty"),
        ({"prompt": "1+1=", "label": "2"}, "`prompt` is of type str, expected a list"),
        ({"prompt": [], "label": "2"}, "expected a list of chat messages that is not empty"),
        ({"prompt": ["1+1="], "label": "2"}, "message 0 of `prompt` is of type str"),
        ({"prompt": [{"role": "robot", "content": "x"}], "label": "2"}, "role 'robot', expected one of"),
        ({"prompt": [{"role": "user", "content": None}], "label": "2"}, "`content` null, expected a string"),
        ({"prompt": [{"role": "user", "content": "\n"}], "label": "2"}, "empty `content`"),
        ({"prompt": [*row()["prompt"], {"role": "assistant", "content": "2"}], "label": "2"}, "by 'assistant'"),
        ([1], "a row is of type list"),
        (None, "a row is null"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, bad: Any, message: str) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [row(), row("2+2=", "4"), bad, row()])
    with pytest.raises(DataError) as error:
        list(read_rows(file, "train"))
    assert str(error.value).startswith(f"{file}:3: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json}\n", "not a JSON object"),
        (b"\n", "not a JSON object"),
        (b'{"prompt": "\xff"}\n', "invalid UTF-8 at byte 12"),
        (b'{"prompt": [{"role": "user", "content": "x"}], "label": "\\ud800"}\n', "lone surrogate"),
        (b"[" * 100_000 + b"\n", "not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(row()).encode() + b"\n" + line)
    with pytest.raises(DataError) as error:
        list(read_rows(file, "train"))
    assert str(error.value).startswith(f"{file}:2: ") and message in str(error.value)


def test_parquet_rows_are_checked_too(tmp_path: Path) -> None:
    numbers = write_parquet(tmp_path / "numbers.parquet", [row(label=1), row(label=2)])
    with pytest.raises(DataError, match=r"numbers\.parquet, row 0: `label` is of type int"):
        list(read_rows(numbers, "train"))
    missing = write_parquet(tmp_path / "missing.parquet", [{"prompt": "x", "answer": "1"}])
    with pytest.raises(DataError, match=r"no column \['label'\] \(it has \['prompt', 'answer'\]\)"):
        list(read_rows(missing, "train"))
    text = pyarrow.array([b"ok", b"\xff\xfe"]).cast(pyarrow.binary()).view(pyarrow.string())
    prompts = pyarrow.array([row()["prompt"]] * 2)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "label": text}), tmp_path / "utf8.parquet")
    with pytest.raises(DataError, match=r"utf8\.parquet, row 1: invalid UTF-8"):
        list(read_rows(tmp_path / "utf8.parquet", "train"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet: not a readable parquet file"):
        list(read_rows(tmp_path / "broken.parquet", "train"))


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        list(read_rows(tmp_path / "nothing", "train"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.jsonl or \.parquet file at all"):
        list(read_rows(tmp_path / "empty", "train"))
    with pytest.raises(DataError, match="has no row in split 'train'"):
        list(read_rows(write_jsonl(tmp_path / "none.jsonl", []), "train"))
    with pytest.raises(DataError, match=r"rows\.csv: unknown kind of file"):
        (tmp_path / "rows.csv").write_text("prompt,label\n")
        list(read_rows(tmp_path / "rows.csv", "train"))
    write_jsonl(tmp_path / "named" / "test.jsonl", [row()])
    with pytest.raises(DataError, match=r"no file of split 'train' \(found test\.jsonl\)"):
        source_files(tmp_path / "named", "train")
