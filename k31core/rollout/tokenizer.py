"""The tokenizer of a checkpoint directory, loaded without a network and without code of its own unless asked."""

from pathlib import Path
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer that cannot be used: names the directory and what to change."""


def load_tokenizer(model_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """Transformers' tokenizer of `model_dir`. Raises TokenizerError."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # transformers warns that it does not know the model type, which says nothing about the tokenizer.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise TokenizerError(
            f"{model_dir}: its tokenizer cannot be loaded ({error}); a tokenizer with its own Python code needs "
            "model.trust_remote_code and a pinned model.revision"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
