"""The small arithmetic data set: `a+b=` problems of reasoning-gym in dapo-math-17k's row format. Torch-free.

A row is `{"prompt": [{"role": "user", "content": "3+4="}], "label": "7"}`. Train and held-out rows are divided by
a hash of the unordered pair of operands, so that `4+3=` is never held out while `3+4=` is trained on.
"""

import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAWS = 400_000
"""Problems drawn from the generator at most; enough to meet every pair of operands up to 29."""
DATASET_MANIFEST = "dataset.json"
SPLITS = ("train", "heldout")


class TinyDataError(ValueError):
    """A data set that cannot be made with these numbers."""


@dataclass(frozen=True, slots=True, order=True)
class Sum:
    """One problem."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """`a+b=`."""
        return f"{self.a}+{self.b}="

    @property
    def label(self) -> str:
        """The sum, in decimal."""
        return str(self.a + self.b)

    def held_out(self, one_in: int) -> bool:
        """Whether a hash of the unordered operands puts it into the held-out set."""
        low, high = sorted((self.a, self.b))
        digest = hashlib.sha256(f"{low}+{high}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % one_in == 0


def arithmetic_problems(max_operand: int, seed: int) -> list[Sum]:
    """Every distinct sum of two operands 1..max_operand that the generator draws, sorted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports, when compiled the first time
        import reasoning_gym  # a large package: seconds to import

    generator = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=DRAWS,
        seed=seed,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=len(str(max_operand)),
        operators=["+"],
        allow_parentheses=False,
        allow_negation=False,
    )
    found: set[Sum] = set()
    for index in range(DRAWS):
        item = generator[index]
        first, _, second = item["metadata"]["expression"].partition(" + ")
        problem = Sum(int(first), int(second))
        if problem.label != item["answer"]:
            raise TinyDataError(f"reasoning-gym says {item['metadata']['expression']} = {item['answer']}")
        if 1 <= problem.a <= max_operand and 1 <= problem.b <= max_operand:
            found.add(problem)
            if len(found) == max_operand**2:
                break
    return sorted(found)


def split_problems(problems: Iterable[Sum], heldout_one_in: int) -> dict[str, list[Sum]]:
    """`train` and `heldout`; raises `TinyDataError` when one of them is empty."""
    parts: dict[str, list[Sum]] = {name: [] for name in SPLITS}
    for problem in problems:
        parts["heldout" if problem.held_out(heldout_one_in) else "train"].append(problem)
    for name, members in parts.items():
        if not members:
            raise TinyDataError(
                f"the {name} set is empty with heldout_one_in {heldout_one_in}: choose another value or more operands"
            )
    return parts


def make_arithmetic_dataset(out_dir: Path, *, max_operand: int, heldout_one_in: int, seed: int) -> dict[str, Any]:
    """Write `train.jsonl`, `heldout.jsonl` and `dataset.json` (counts and digests); returns the latter's content.

    The same arguments give the same bytes.
    """
    parts = split_problems(arithmetic_problems(max_operand, seed), heldout_one_in)
    out_dir.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, members in parts.items():
        lines = [
            json.dumps({"prompt": [{"role": "user", "content": p.question}], "label": p.label}) + "\n" for p in members
        ]
        data = "".join(lines).encode()
        (out_dir / f"{name}.jsonl").write_bytes(data)
        files[name] = {"path": f"{name}.jsonl", "rows": len(members), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {
        "kind": "arithmetic",
        "generator": f"reasoning-gym {importlib.metadata.version('reasoning-gym')} basic_arithmetic",
        "max_operand": max_operand,
        "heldout_one_in": heldout_one_in,
        "seed": seed,
        "files": files,
    }
    (out_dir / DATASET_MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return manifest
