"""Divergences and their gradients with respect to the draft's logits, in closed form.

With q = softmax(z), a divergence whose derivative by q is c has the gradient q (c - <q, c>) by z.
Where the teacher's law is cut to its top tokens and a tail (`losses.coarsen`), the same formulas
hold with the tail's mass shared out as the draft shares its own: the ratio of the two laws is then
the same for every token of the tail, and so is c.

Letters: P predicted tokens, K steps (one teacher's law for all), W draft vocabulary, M divergences.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.heads.losses import TINY
from outrider.heads.objective import Objective


class Slope(NamedTuple):
    """What an objective makes of logits."""

    each_PKM: Tensor
    """Every divergence, without its weight."""
    accept_PK: Tensor
    """Sum of min(p, q) of the whole laws."""
    grad_PKW: Tensor
    """Of the weighted sum, with respect to the logits."""


class _Laws(NamedTuple):
    log_q: Tensor
    q: Tensor
    log_p: Tensor
    p: Tensor
    cross: Tensor
    """Cross-entropy of p and q."""
    entropy: Tensor
    """Of p."""


def slope(logits_PKW: Tensor, teacher_P1W: Tensor, objective: Objective) -> Slope:
    """Values and gradient of an objective, as autograd finds them for `Objective.loss`.

    Args:
        logits_PKW: The draft's, fp32 or better; they are not changed.
        teacher_P1W: The target's probabilities at the objective's temperature.
        objective: What to compute.
    """
    scaled = logits_PKW if objective.temperature == 1 else logits_PKW / objective.temperature
    if objective.top_k is None and len(objective.terms) == 1:
        (name, weight) = objective.terms[0]
        if name in ("soft_ce", "kl"):
            found = _cross_entropy(scaled, teacher_P1W, name)
            factor = weight / objective.temperature
            return found if factor == 1 else found._replace(grad_PKW=found.grad_PKW.mul_(factor))
    return _general(scaled, teacher_P1W, objective)


def _cross_entropy(logits: Tensor, probs: Tensor, name: str) -> Slope:
    """soft_ce and kl in few passes: the gradient is q - p, and min(p, q) sums to 1 - |q - p|/2."""
    top = logits.amax(-1, keepdim=True)
    dot = (logits @ probs.transpose(-1, -2)).squeeze(-1)
    grad = logits.softmax(-1)
    loss = (top - grad.amax(-1, keepdim=True).log()).squeeze(-1) - dot
    if name == "kl":
        loss = loss + torch.xlogy(probs, probs).sum(-1)
    grad.sub_(probs)
    accept = 1 - 0.5 * torch.linalg.vector_norm(grad, ord=1, dim=-1)
    return Slope(loss.unsqueeze(-1), accept, grad)


def _general(scaled: Tensor, teacher: Tensor, objective: Objective) -> Slope:
    log_q = scaled.log_softmax(-1)
    q = log_q.exp()
    accept = torch.minimum(q, teacher).sum(-1)
    if objective.top_k is None or objective.top_k >= teacher.shape[-1]:
        laws = _whole(log_q, q, teacher, objective.names)
    else:
        laws = _cut(log_q, q, teacher, objective.top_k)
    found = [_term(name, laws, teacher, objective.lk_decay) for name in objective.names]
    parts = [
        part if weight == objective.temperature else part * (weight / objective.temperature)
        for weight, (_, part) in zip(objective.weights, found, strict=True)
    ]
    grad = parts[0]
    for part in parts[1:]:
        grad = grad + part
    return Slope(torch.stack([value for value, _ in found], -1), accept, grad)


def _whole(log_q: Tensor, q: Tensor, teacher: Tensor, names: Collection[str]) -> _Laws:
    """The laws as they are; what none of the divergences reads stays zero."""
    log_p = cross = entropy = q.new_zeros(())
    if "reverse_kl" in names:
        log_p = teacher.clamp(min=TINY).log()
    if not {"soft_ce", "kl", "lk_lambda"}.isdisjoint(names):
        cross, entropy = -(teacher * log_q).sum(-1), -torch.xlogy(teacher, teacher).sum(-1)
    return _Laws(log_q, q, log_p, teacher, cross, entropy)


def _cut(log_q: Tensor, q: Tensor, teacher: Tensor, top_k: int) -> _Laws:
    """The teacher's top tokens, and its tail as the draft would share it out."""
    ids = teacher.topk(top_k, dim=-1).indices
    is_tail = torch.ones_like(teacher, dtype=torch.bool).scatter(-1, ids, value=False)
    tail = (teacher * is_tail).sum(-1, keepdim=True)
    log_rest = log_q.masked_fill(~is_tail, float("-inf")).logsumexp(-1, keepdim=True)
    share = log_q - log_rest
    log_p = torch.where(is_tail, tail.clamp(min=TINY).log() + share, teacher.clamp(min=TINY).log())
    p = torch.where(is_tail, tail * share.exp(), teacher)
    top = teacher * ~is_tail
    cross = -(top * log_q).sum(-1) - (tail * log_rest).squeeze(-1)
    entropy = -torch.xlogy(top, top).sum(-1) - torch.xlogy(tail, tail).squeeze(-1)
    return _Laws(log_q, q, log_p, p, cross, entropy)


def _term(name: str, laws: _Laws, teacher: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """One divergence and its gradient by the scaled logits."""
    log_q, q, log_p, p = laws.log_q, laws.q, laws.log_p, laws.p
    if name in ("soft_ce", "kl"):
        return laws.cross - (laws.entropy if name == "kl" else 0), q - p
    if name == "reverse_kl":
        ratio = log_q - log_p
        value = (q * ratio).sum(-1)
        return value, q * (ratio - value.unsqueeze(-1))
    if name == "jsd":
        middle = (p + q) / 2
        by_q = (log_q - middle.clamp(min=TINY).log()) / 2
        by_p = torch.xlogy(p, p) - torch.xlogy(p, middle)
        mean = (q * by_q).sum(-1)
        return mean + by_p.sum(-1) / 2, q * (by_q - mean.unsqueeze(-1))
    if name == "hard_ce":
        best = teacher.argmax(-1, keepdim=True).expand(*q.shape[:-1], 1)
        grad = q.scatter_add(-1, best, q.new_full((), -1.0).expand(best.shape))
        return -log_q.gather(-1, best).squeeze(-1), grad
    sign = (q - p).sign() / 2
    toward = q * (sign - (q * sign).sum(-1, keepdim=True))
    if name == "tv":
        return (q - p).abs().sum(-1) / 2, toward
    accept = torch.minimum(q, p).sum(-1)
    if name == "lk_alpha":
        steep = torch.where(accept > TINY, 1 / accept.clamp(min=TINY), 0.0)
        return -accept.clamp(min=TINY).log(), toward * steep.unsqueeze(-1)
    assert name == "lk_lambda"
    mix = (-decay * accept).exp()
    value = mix * (laws.cross - laws.entropy) + (1 - mix) * (q - p).abs().sum(-1) / 2
    mix = mix.unsqueeze(-1)
    return value, mix * (q - p) + (1 - mix) * toward
