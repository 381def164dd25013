"""The base of every recipe section: frozen, strict about unknown fields, explained under each field."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the recipe tree. An unknown field is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
