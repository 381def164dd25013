"""The tiny checkpoint's pre-training: half of the answers think before they answer, half guess.

Legend: B problems of a batch, T packed tokens, V vocabulary.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k31core.convert.tiny_data import Sum
from k31core.convert.tiny_tokenizer import EOS, VOCABULARY, encode_text, prompt_tokens
from k31core.model.decoder import Decoder, Packed

Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, what to show)."""
WARMUP_STEPS = 50
MAX_NEW_TOKENS = 20
_REPORT_EVERY = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """What sampling at temperature 1 gives."""

    accuracy: float
    """Share of answers with the right boxed sum: the reward RL starts from."""
    boxed: float
    """Share of answers with a box after `</think>` that ended by themselves."""
    careful: float
    """Share of answers that think before they answer."""
    samples: int


def answer_text(problem: Sum, careful: bool, guess: int) -> str:
    """A careful answer computes the sum inside the thoughts; the other one writes `guess` without thinking."""
    if careful:
        return f"<think>{problem.question}{problem.label}</think>\\boxed{{{problem.label}}}"
    return f"<think></think>\\boxed{{{guess}}}"


def pretrain(
    decoder: Decoder,
    problems: Sequence[Sum],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    careful_share: float,
    seed: int,
    progress: Progress,
) -> float:
    """Train every weight on answers drawn for `problems`; returns the mean loss of the last steps (nats a token).

    AdamW with beta2 0.98, warm-up of 50 steps, then linear decay to zero. One thread of float32, so the same arguments
    give the same bits.
    """
    rng = random.Random(seed)
    largest = max(max(p.a, p.b) for p in problems)
    trained = [p for p in decoder.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    recent: list[float] = []
    for step in range(steps):
        rate = lr * min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = []
        for _ in range(batch_size):
            problem = problems[rng.randrange(len(problems))]
            careful = rng.random() < careful_share
            text = answer_text(problem, careful, rng.randint(2, 2 * largest))
            batch.append((prompt_tokens(problem.question), [*encode_text(text), EOS]))
        loss = answer_loss(decoder, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        recent = [*recent[-9:], float(loss.detach())]
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == steps:
            progress(step + 1, steps, f"loss {sum(recent) / len(recent):.3f}")
    return sum(recent) / len(recent)


def answer_loss(decoder: Decoder, batch: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Mean negative log-likelihood of the answers' tokens; `batch` holds (prompt, answer) token ids."""
    packed = pack_sequences([prompt + answer for prompt, answer in batch])
    logits = decoder.logits(decoder(packed))
    rows, labels, begin = [], [], 0
    for prompt, answer in batch:
        rows += range(begin + len(prompt) - 1, begin + len(prompt) + len(answer) - 1)
        labels += answer
        begin += len(prompt) + len(answer)
    return torch.nn.functional.cross_entropy(logits[torch.tensor(rows)], torch.tensor(labels))


def pack_sequences(sequences: Sequence[Sequence[int]]) -> Packed:
    """One packed batch of whole sequences."""
    lengths = torch.tensor([0, *map(len, sequences)])
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return Packed(tokens, lengths.cumsum(0))


@torch.no_grad()
def sample_answers(decoder: Decoder, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """One answer a prompt at temperature 1, by running the whole prefix again for every token. End token left out."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [list(prompt) for prompt in prompts]
    open_ = list(range(len(prompts)))
    ended = [False] * len(prompts)
    for _ in range(MAX_NEW_TOKENS):
        packed = pack_sequences([sequences[i] for i in open_])
        hidden = decoder(packed)[packed.cu_seqlens[1:] - 1]
        drawn = torch.multinomial(torch.softmax(decoder.logits(hidden), -1), 1, generator=generator)[:, 0].tolist()
        for i, token in zip(open_, drawn):
            if token == EOS:
                ended[i] = True
            else:
                sequences[i].append(token)
        open_ = [i for i in open_ if not ended[i]]
        if not open_:
            break
    return [
        sequence[len(prompt) :] + ([EOS] if end else []) for sequence, prompt, end in zip(sequences, prompts, ended)
    ]


def measure(decoder: Decoder, problems: Sequence[Sum], *, samples: int, seed: int) -> Measured:
    """Sample one answer for each of `samples` problems, drawn evenly, and grade it."""
    rng = random.Random(seed)
    chosen = [problems[rng.randrange(len(problems))] for _ in range(samples)]
    right = boxed = careful = 0
    for begin in range(0, samples, 128):
        part = chosen[begin : begin + 128]
        answers = sample_answers(decoder, [prompt_tokens(p.question) for p in part], seed + begin)
        for problem, answer in zip(part, answers):
            text = "".join(VOCABULARY[token] for token in answer if token != EOS)
            thought, closed, final = text.rpartition("</think>")
            box = final.startswith("\\boxed{") and final.endswith("}") and bool(closed)
            boxed += box and answer[-1:] == [EOS]
            careful += len(thought) > len("<think>")
            right += box and final[len("\\boxed{") : -1] == problem.label
    return Measured(right / samples, boxed / samples, careful / samples, samples)
