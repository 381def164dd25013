"""A small model with tokenizer and data set, for tests that run rollout and training workers together."""

from pathlib import Path

from k31core.convert.tiny_data import make_arithmetic_dataset
from k31core.convert.tiny_tokenizer import write_tokenizer
from k31core.rollout.prepare_data import PrepareSettings, prepare_split
from tests.model_cases import config_of, write_checkpoint

OVERRIDES = (
    "rollout.prompts_per_step=3",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=12",
    "rollout.top_logprobs_num=8",
    "train.lora.rank=4",
    "train.lora.alpha=8",
)
"""Overrides of recipe `tiny` that fit these inputs."""


def write_loop_inputs(root: Path) -> tuple[Path, Path]:
    """(model directory, data directory) of a random 4-layer model with the tiny tokenizer and sums."""
    model = root / "model"
    model.mkdir()
    write_checkpoint(model, config_of(layers=4, mla=(4,), vocab_size=32))
    write_tokenizer(model)
    make_arithmetic_dataset(root / "raw", max_operand=9, heldout_one_in=5, seed=0)
    (root / "data").mkdir()
    for name in ("train", "heldout"):
        made = prepare_split(root / "raw", model, root / "prepared", PrepareSettings(name, 32))
        (root / "data" / name).symlink_to(made)
    return model, root / "data"
