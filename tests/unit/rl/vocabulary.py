"""An independent float64 reference over the whole vocabulary, one token at a time, straight from the formulas."""

import math

import torch

from k31core.rl.loss_records import LossInputs, TokenOrigin


def weight(r, mode):
    return {"none": 1.0, "tis": min(r, 2.0), "mis": r if 0.5 <= r <= 5 else 0.0}[mode]


def reference_loss(logits, q, head, token, advantage, mode, support=False):
    """(loss, gradient on the logits) of one token with scalar arithmetic and an analytic softmax gradient."""
    full = torch.softmax(logits.double(), -1).tolist()
    words = range(len(full))
    inside = set(head) if support else set(words)
    z = sum(full[v] for v in inside)
    p = [full[v] / z if v in inside else 0.0 for v in words]
    rho = max(1 - sum(q[v] for v in head), 1e-6) / max(1 - sum(p[v] for v in head), 1e-6)
    alpha = rho * weight(1 / rho, mode)
    coef = {v: q[v] * weight(p[v] / q[v], mode) - alpha * p[v] for v in head}
    w = weight(p[token] / q[token], mode)
    loss = -advantage * (w * math.log(p[token]) - sum(c * math.log(p[v]) for v, c in coef.items() if c))
    # d log p_v / d logit_u = [u = v] - p_u
    grad = [
        -advantage * (w * ((u == token) - p[u]) - sum(c * ((u == v) - p[u]) for v, c in coef.items())) for u in words
    ]
    return loss, grad


def inputs_from_logits(logits, q, heads, tokens, advantages, mask=None):
    """`LossInputs` of T rows: logits `[T, V]` (with gradient), q `[T, V]`, heads: lists of ids (padded with -1)."""
    width = max(len(h) for h in heads)
    ids = torch.tensor([h + [-1] * (width - len(h)) for h in heads])
    log_p = torch.log_softmax(logits, -1)
    log_q = torch.as_tensor(q, dtype=logits.dtype).log()
    labels = torch.tensor(tokens)
    pad = ids < 0

    def pick(table):
        return table.gather(1, ids.clamp(min=0)).masked_fill(pad, float("-inf"))

    rows = len(tokens)
    return LossInputs(
        logprobs=log_p.gather(1, labels[:, None])[:, 0],
        candidate_logprobs=pick(log_p),
        sampler_logprobs=log_q.gather(1, labels[:, None])[:, 0],
        sampler_candidate_logprobs=pick(log_q),
        candidate_ids=ids,
        label_ids=labels,
        advantages=torch.tensor(advantages, dtype=logits.dtype),
        mask=torch.ones(rows, dtype=torch.bool) if mask is None else torch.tensor(mask),
        origin=TokenOrigin(("3-0-1", "3-0-2"), torch.arange(rows) % 2, torch.arange(rows) + 7),
    )
