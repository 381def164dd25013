"""The prepared data set: tokenised prompts in a memory-mapped file, and the order in which a run draws them. No torch.

A prepared split is a directory with `prompts.safetensors` (columns below) and `manifest.json`. P prompts:

    tokens        [T]    int32   all prompts one after the other        token_starts  [P+1] int64
    labels        [B]    uint8   UTF-8                                  label_starts  [P+1] int64
    messages      [M]    uint8   JSON of the chat messages, UTF-8       message_starts [P+1] int64
    ids           [P,16] uint8   first half of the SHA-256 of messages, label and (kept duplicates) which copy it is
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k31core.rl.types import Prompt
from k31core.rollout.dataset_file import DataError

COLUMNS_FILE = "prompts.safetensors"
MANIFEST_FILE = "manifest.json"
_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "U8": np.dtype("u1")}
_EXPECTED = {
    **{"tokens": "I32", "token_starts": "I64", "labels": "U8", "label_starts": "I64"},
    **{"messages": "U8", "message_starts": "I64", "ids": "U8"},
}


@dataclass(frozen=True, slots=True)
class PreparedSplit:
    """One split, memory-mapped."""

    directory: Path
    manifest: dict[str, Any]
    columns: dict[str, NDArray[Any]]

    @staticmethod
    def open(directory: Path) -> "PreparedSplit":
        """Maps a prepared split. Raises DataError when it is not one or not whole."""
        manifest_file, columns_file = directory / MANIFEST_FILE, directory / COLUMNS_FILE
        try:
            manifest = json.loads(manifest_file.read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{manifest_file}: no manifest of a prepared data set ({error}); prepare it again"
            ) from error
        columns = _map_columns(columns_file)
        count = len(columns["ids"])
        if manifest.get("prompts") != count or any(
            len(columns[f"{name}_starts"]) != count + 1 for name in ("token", "label", "message")
        ):
            raise DataError(f"{columns_file}: columns and manifest disagree on the number of prompts; prepare it again")
        return PreparedSplit(directory, manifest, columns)

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        """The prompt of a row, `0 <= row < len(self)`."""
        if not 0 <= row < len(self):
            raise DataError(f"{self.directory}: no row {row}, it has {len(self)} prompts; is this another data set?")
        starts = self.columns["token_starts"]
        tokens = self.columns["tokens"][starts[row] : starts[row + 1]]
        return Prompt(
            prompt_id=self.columns["ids"][row].tobytes().hex(),
            tokens=tuple(tokens.tolist()),
            label=self._text("labels", "label_starts", row),
            row=row,
            epoch=epoch,
        )

    def messages(self, row: int) -> list[dict[str, str]]:
        """The chat messages of a row."""
        messages: list[dict[str, str]] = json.loads(self._text("messages", "message_starts", row))
        return messages

    def _text(self, column: str, starts_column: str, row: int) -> str:
        starts = self.columns[starts_column]
        return bytes(self.columns[column][starts[row] : starts[row + 1]]).decode("utf-8")


@dataclass(frozen=True, slots=True)
class PromptStream:
    """Draws prompts epoch after epoch; the order of an epoch depends on nothing but (seed, epoch).

    A cursor is the JSON value `{"epoch": e, "position": p}`: prompts of epoch e that were drawn. None is the beginning.
    """

    split: PreparedSplit
    seed: int
    shuffle: bool = True

    def draw(self, cursor: Any, count: int) -> tuple[list[Prompt], dict[str, int]]:
        """(the next `count` prompts, cursor after them). Raises DataError for a cursor of another data set."""
        epoch, position = self._checked(cursor)
        prompts: list[Prompt] = []
        while len(prompts) < count:
            order = self.order(epoch)
            rows = order[position : position + count - len(prompts)]
            prompts += [self.split.prompt(int(row), epoch) for row in rows]
            position += len(rows)
            if position == len(order):
                epoch, position = epoch + 1, 0
        return prompts, {"epoch": epoch, "position": position}

    def prompt(self, row: int, epoch: int) -> Prompt:
        """The prompt of a row as drawn in `epoch`."""
        return self.split.prompt(row, epoch)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Rows of the split in the order of `epoch`: `[P]` int64."""
        count = len(self.split)
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        digest = hashlib.sha256(f"k31 prompt order {self.seed} {epoch}".encode()).digest()
        # Sorting random 64-bit keys: unlike a generator's shuffle, this is the same in every version of numpy.
        keys = np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)).random_raw(count)
        return np.argsort(keys, kind="stable").astype(np.int64)

    def _checked(self, cursor: Any) -> tuple[int, int]:
        if cursor is None:
            return 0, 0
        try:
            epoch, position = cursor["epoch"], cursor["position"]
        except (TypeError, KeyError) as error:
            raise DataError(f'the cursor is {cursor!r}, expected {{"epoch": e, "position": p}}') from error
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < len(self.split):
            raise DataError(
                f"the cursor {cursor} does not fit {self.split.directory} with {len(self.split)} prompts: the data set "
                "is another than the run started with"
            )
        return epoch, position


def _map_columns(file: Path) -> dict[str, NDArray[Any]]:
    """The columns of a safetensors file as read-only views of one memory map."""
    try:
        data = np.memmap(file, dtype=np.uint8, mode="r")
        size = int(data[:8].view("<u8")[0])
        header = json.loads(bytes(data[8 : 8 + size]))
        body = data[8 + size :]
        columns = {}
        for name, dtype in _EXPECTED.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            if entry["dtype"] != dtype or end > len(body):
                raise ValueError(f"column {name} is {entry['dtype']} up to byte {end} of {len(body)}")
            columns[name] = body[begin:end].view(_DTYPES[dtype]).reshape(entry["shape"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{file}: not a whole prepared data set ({error}); prepare it again") from error
    return columns
