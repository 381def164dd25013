"""The tiny checkpoint's tokenizer: 32 words, one for each character of a sum and one for each marker of an answer.

Files as Hugging Face writes them, so `AutoTokenizer.from_pretrained(directory)` loads them without any code of ours.
"""

from pathlib import Path

VOCABULARY = (
    *("<|pad|>", "<|bos|>", "<|im_end|>", "<|unk|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
    *("<think>", "</think>", "\\boxed{", "}"),
    *"0123456789+-*=.,()? \n",
)
PAD, BOS, EOS, UNK = 0, 1, 2, 3
CONTROL = VOCABULARY[:7]
"""Dropped by `decode(skip_special_tokens=True)`; the answer's markers are kept."""
MARKERS = ("<think>", "</think>", "\\boxed{")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_assistant|>' }}{%- endif -%}"
)
WORD_ID = {word: index for index, word in enumerate(VOCABULARY)}


def encode_text(text: str) -> list[int]:
    """Token ids of a text made of the vocabulary's words; markers are one token each."""
    ids = []
    at = 0
    while at < len(text):
        word = next((m for m in (*CONTROL, *MARKERS) if text.startswith(m, at)), text[at])
        ids.append(WORD_ID[word])
        at += len(word)
    return ids


def prompt_tokens(question: str) -> list[int]:
    """What the chat template makes of one user message, generation prompt included."""
    return encode_text(f"<|im_user|>{question}<|im_end|><|im_assistant|>")


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template into `directory`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # Byte-pair encoding without merges: every character is its own token, and decoding joins without spaces.
    tokenizer = Tokenizer(models.BPE(vocab=dict(WORD_ID), merges=[], unk_token=VOCABULARY[UNK]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in CONTROL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=VOCABULARY[PAD],
        bos_token=VOCABULARY[BOS],
        eos_token=VOCABULARY[EOS],
        unk_token=VOCABULARY[UNK],
        additional_special_tokens=list(CONTROL[4:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.save_pretrained(str(directory))
