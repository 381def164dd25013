"""Tokens to text and the tokens that end an answer, from the tokenizer in the model directory. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31core.rl.types import Completion, FinishReason
from k31core.rollout.tokenizer import TokenizerError, load_tokenizer


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A loaded tokenizer."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    """Ascending."""

    @staticmethod
    def load(model_dir: Path, *, trust_remote_code: bool = False) -> "TextCodec":
        """The tokenizer of a checkpoint directory. Raises TokenizerError when it is unusable or has no end token."""
        tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
        stops = _generation_stops(model_dir / "generation_config.json")
        if tokenizer.eos_token_id is not None:
            stops.add(int(tokenizer.eos_token_id))
        if not stops:
            raise TokenizerError(
                f"{model_dir}: neither generation_config.json nor the tokenizer names an end token (eos_token_id); "
                "every answer would run to the token limit"
            )
        return TextCodec(tokenizer, tuple(sorted(stops)))

    def answer_text(self, completion: Completion) -> str:
        """The text of an answer, its stop token left out; markers such as `</think>` are kept."""
        tokens = completion.tokens.tolist()
        if completion.finish is FinishReason.STOP:
            tokens = tokens[:-1]
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _generation_stops(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        value = json.loads(path.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{path}: not a JSON object ({error})") from error
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(v) is int and v >= 0 for v in values):
        raise TokenizerError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of them")
    return set(values)
