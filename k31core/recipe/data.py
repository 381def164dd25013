"""Prompts: data sets, chat template, limits and duplicates."""

from typing import Literal, Self

from pydantic import Field, model_validator

from k31core.recipe.section import Section


class DatasetRecipe(Section):
    """One data set in dapo-math-17k's row format: `prompt` (chat messages) and `label` (string)."""

    name: str
    source: Literal["hub", "file", "arithmetic"]
    """`hub`: a Hub data set; `file`: jsonl, parquet or a folder under the data directory; `arithmetic`: made here."""
    repo: str | None = None
    path: str | None = None
    """File or folder under the data directory (source `file`)."""
    revision: str | None = None
    split: str = "train"
    duplicates: Literal["refuse", "drop", "keep"] = "drop"
    """Rows with the same prompt: an error, all but the first dropped (and counted), or kept."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Prompts longer than `data.max_prompt_tokens`: listed, then an error or dropped."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source == "hub" and not self.repo:
            raise ValueError(f"data set {self.name!r}: source 'hub' needs `repo`")
        if self.source == "file" and not self.path:
            raise ValueError(f"data set {self.name!r}: source 'file' needs `path`")
        return self


class DataRecipe(Section):
    """Training prompts and how they are drawn."""

    train: DatasetRecipe
    heldout: DatasetRecipe | None = None
    """Evaluated before the first step and at `eval.interval`."""
    max_prompt_tokens: int = Field(1024, ge=1)
    thinking_effort: str | None = None
    """Passed to the chat template; None is the tokenizer's own default."""
    shuffle: bool = True
    """Deterministic shuffle per epoch from (seed, epoch)."""
