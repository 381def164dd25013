"""The tiny checkpoint's maker: layout, determinism, tokenizer, data set, and the gate before RL."""

import hashlib
import json

import pytest
import torch
from transformers import AutoTokenizer

from k31core.checkpoint.native import NativeCheckpoint
from k31core.convert.tiny import TinyGateError, _gate, make_tiny_checkpoint
from k31core.convert.tiny_data import Sum, TinyDataError, arithmetic_problems, make_arithmetic_dataset, split_problems
from k31core.convert.tiny_model import INDEX_TOPK, tiny_config
from k31core.convert.tiny_pretrain import Measured, answer_text, measure, sample_answers
from k31core.convert.tiny_tokenizer import (
    CONTROL,
    EOS,
    MARKERS,
    VOCABULARY,
    encode_text,
    prompt_tokens,
    write_tokenizer,
)
from k31core.model.build import Build
from k31core.model.config import load_config, parse_config
from k31core.model.decoder import Decoder
from k31core.model.weight_names import IGNORED_PREFIXES, base_slots, expected_names
from k31core.recipe.load import load_recipe
from k31core.recipe.model import TinyCheckpoint

SMALL = TinyCheckpoint(hidden_size=32, num_hidden_layers=4, max_operand=9, steps=3, batch_size=8)
FEW = {"train": 8, "heldout": 4}


def files_of(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.fixture(scope="module", params=["kimi_k31", "kimi_k3"])
def made(request, tmp_path_factory):
    """(family, directory) of a checkpoint after three steps: too early for the gate, which comes last."""
    directory = tmp_path_factory.mktemp(request.param)
    notes = []
    with pytest.raises(TinyGateError, match=r"model\.tiny"):
        make_tiny_checkpoint(SMALL, request.param, directory, lambda *note: notes.append(note), gate_samples=FEW)
    assert notes[-1][:2] == (3, 3)
    assert "sampled accuracy" in notes[-1][2]
    return request.param, directory


def test_checkpoint_is_in_the_native_layout(made):
    family, directory = made
    config = load_config(directory)
    assert config.family == family
    assert (config.dsa is not None) == (family == "kimi_k31")
    checkpoint = NativeCheckpoint(directory)
    checkpoint.check_names(expected_names(config), IGNORED_PREFIXES)
    decoder = Decoder(config, Build())
    checkpoint.load(base_slots(decoder), progress=False)
    assert all(bool(p.isfinite().all()) for p in decoder.parameters())
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert "language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight_packed" in index["weight_map"]


def test_a_second_make_gives_the_same_bytes_and_another_seed_does_not(made, tmp_path):
    family, directory = made
    again, other = tmp_path / "again", tmp_path / "other"
    for target, config in ((again, SMALL), (other, SMALL.model_copy(update={"seed": 1}))):
        with pytest.raises(TinyGateError):
            make_tiny_checkpoint(config, family, target, lambda *_: None, gate_samples=FEW)
    first, second, third = files_of(directory), files_of(again), files_of(other)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert [n for n in first if n.endswith(".safetensors") and first[n] == third[n]] == []


def test_tiny_configuration_exercises_every_part():
    recipe = load_recipe("tiny")
    tiny = recipe.model.tiny
    config = parse_config(
        tiny_config(family="kimi_k31", hidden_size=tiny.hidden_size, num_hidden_layers=tiny.num_hidden_layers)
    )
    longest = len(prompt_tokens("29+29=")) + len(encode_text(answer_text(Sum(29, 29), True, 0))) + 1
    assert INDEX_TOPK < longest <= recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    assert recipe.rollout.top_logprobs_num < config.vocab_size == 32
    assert config.num_hidden_layers // config.attn_res_block_size >= 2
    assert 0 < len(config.mla_layers) < config.num_hidden_layers
    assert config.is_moe(1)
    assert not config.is_moe(0)


def test_auto_tokenizer_loads_the_files_and_agrees_with_ours(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(VOCABULARY) == 32
    messages = [{"role": "user", "content": "12+7="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == prompt_tokens("12+7=")
    answer = answer_text(Sum(12, 7), True, 0)
    assert tokenizer.encode(answer, add_special_tokens=False) == encode_text(answer)
    assert tokenizer.decode([*encode_text(answer), EOS], skip_special_tokens=True) == answer
    assert tokenizer.eos_token_id == EOS
    for marker in (*MARKERS, *CONTROL):
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    assert tokenizer.encode("x", add_special_tokens=False) == [3]


def test_data_set_is_dapo_rows_disjoint_and_deterministic(tmp_path):
    call = {"max_operand": 9, "heldout_one_in": 5, "seed": 0}
    manifest = make_arithmetic_dataset(tmp_path / "a", **call)
    make_arithmetic_dataset(tmp_path / "b", **call)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    rows = {}
    for split in ("train", "heldout"):
        data = (tmp_path / "a" / f"{split}.jsonl").read_bytes()
        assert hashlib.sha256(data).hexdigest() == manifest["files"][split]["sha256"]
        rows[split] = [json.loads(line) for line in data.splitlines()]
        assert len(rows[split]) == manifest["files"][split]["rows"] > 5
    pairs = {}
    for split, members in rows.items():
        for row in members:
            (message,) = row["prompt"]
            assert message["role"] == "user"
            a, b = message["content"].rstrip("=").split("+")
            assert row["label"] == str(int(a) + int(b))
            pairs.setdefault(split, set()).add(frozenset((int(a), int(b))))
    assert not pairs["train"] & pairs["heldout"]  # not even with the operands exchanged
    assert len(rows["train"]) + len(rows["heldout"]) == 81


def test_every_pair_of_the_shipped_range_is_met():
    assert len(arithmetic_problems(29, 0)) == 29 * 29


def test_an_empty_split_is_refused():
    with pytest.raises(TinyDataError, match="heldout set is empty with heldout_one_in 1000000"):
        split_problems([Sum(1, 2), Sum(3, 4)], 1_000_000)


@pytest.mark.parametrize(
    "accuracy,boxed,message",
    [
        (0.5, 0.89, r"only 0.890 of 256 sampled answers are boxed .* raise model\.tiny\.steps"),
        (0.29, 1.0, r"0.290 of 256 answers is outside 0.3 to 0.65: raise model\.tiny\.steps"),
        (0.66, 1.0, r"0.660 .*: lower model\.tiny\.steps"),
    ],
)
def test_the_gate_names_what_to_change(accuracy, boxed, message):
    with pytest.raises(TinyGateError, match=message):
        _gate(Measured(accuracy, boxed, 0.5, 256))


@pytest.mark.parametrize("accuracy", [0.3, 0.5, 0.65])
def test_the_gate_lets_a_good_start_through(accuracy):
    _gate(Measured(accuracy, 0.9, 0.5, 256))


class Parrot:
    """A decoder that continues every prompt with fixed words: tests sampling and grading without training."""

    def __init__(self, text):
        self.answer = [*encode_text(text), EOS]

    def __call__(self, packed):
        self.lengths = (packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]).tolist()
        rows = torch.zeros(len(packed.tokens), 32)
        for end, length in zip(packed.cu_seqlens[1:].tolist(), self.lengths):
            done = length - len(prompt_tokens("1+2="))
            rows[end - 1, self.answer[min(done, len(self.answer) - 1)]] = 1e9
        return rows

    def logits(self, hidden):
        return hidden


def test_sampling_and_grading_of_known_answers():
    problem = Sum(1, 2)
    right = answer_text(problem, True, 0)
    assert sample_answers(Parrot(right), [prompt_tokens("1+2=")] * 3, 0) == [[*encode_text(right), EOS]] * 3
    result = measure(Parrot(right), [problem], samples=4, seed=0)
    assert (result.accuracy, result.boxed, result.careful) == (1.0, 1.0, 1.0)
    result = measure(Parrot(answer_text(problem, False, 9)), [problem], samples=4, seed=0)
    assert (result.accuracy, result.boxed, result.careful) == (0.0, 1.0, 0.0)
    result = measure(Parrot("<think>1+2=3</think>3"), [problem], samples=4, seed=0)
    assert (result.accuracy, result.boxed) == (0.0, 0.0)
    result = measure(Parrot("<think>" + "1" * 30), [problem], samples=4, seed=0)
    assert (result.accuracy, result.boxed) == (0.0, 0.0)
