"""Output head, objective and their gradients in one pass over chunks of rows.

The gradient with respect to the logits is known as soon as the logits are, so both matrix products
of the backward pass run in the forward one and no [rows, vocabulary] tensor outlives its chunk.

Letters: P predicted tokens, K steps, D draft hidden size, H target hidden size, W draft vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.heads.eagle import EagleHead
from outrider.heads.losses import Slope, objective, slope
from outrider.heads.tables import Tables, bend

CHUNK_ELEMENTS = 1 << 23
"""Logits formed at a time: 1,024 rows of a draft vocabulary of 8,192."""
SLICE_ELEMENTS = 1 << 19
"""Logits whose elementwise work is done at a time, so that it stays in cache."""


class Teacher(NamedTuple):
    """Where the target's probabilities come from: one state per predicted token."""

    state_PH: Tensor
    """The target's state (after its final norm) one position before the predicted token."""
    table_WH: Tensor
    """Rows of the target's output head for the proposable draft ids."""
    tables: Tables
    """For the target's own scale and cap on logits."""


class Scored(NamedTuple):
    """What a pass over the loss pairs yields; only `loss` carries a gradient."""

    loss: Tensor
    """Sum of weight times loss."""
    loss_PK: Tensor
    """Unweighted loss of every pair."""
    accept_PK: Tensor
    """Sum of min(p, q) of every pair, over the draft vocabulary with p renormalised on it."""


def teacher_probs(teacher: Teacher, rows: slice | None = None) -> Tensor:
    """The target's law over the draft vocabulary, renormalised there; [rows, W], fp32 or better."""
    state = teacher.state_PH if rows is None else teacher.state_PH[rows]
    logits = state.to(teacher.table_WH.dtype) @ teacher.table_WH.T
    exact = torch.promote_types(logits.dtype, torch.float32)
    return bend(logits.to(exact), teacher.tables).softmax(-1)


def teacher_of(head: EagleHead, state_PH: Tensor, dtype: torch.dtype) -> Teacher:
    """The teacher of a head for given target states."""
    return Teacher(state_PH, head.teacher_rows(dtype), head.lent())


def best_is_inside(head: EagleHead, state_PH: Tensor, chunk: int = 1024) -> Tensor:
    """Whether the target's most likely id (over its whole vocabulary) is in the draft's; bool [P].

    This costs a product with the whole output head: compute it once per stored row and keep it.
    """
    known_V = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=state_PH.device)
    known_V[head.draft_ids_W[: head.config.num_proposable]] = True
    table_VH = head.lent().output_VH[: head.config.tokenizer_size]
    parts = [(x.to(table_VH.dtype) @ table_VH.T).argmax(-1) for x in state_PH.split(chunk)]
    return known_V[torch.cat(parts)] if parts else known_V[:0]


def score_pairs(
    hidden_PKD: Tensor,
    output_WD: Tensor,
    teacher: Teacher,
    weight_PK: Tensor,
    name: str = "soft_ce",
) -> Scored:
    """Objective of every pair against its teacher, summed with weights (zero: not in the loss).

    hidden is what the output head multiplies (head.output_input), output its rows
    (head.output_weight): fp32 master weights are fine, the products run in the dtype of hidden.
    """
    objective(name)
    return Scored(*_ScorePairs.apply(hidden_PKD, output_WD, teacher, weight_PK, name))


class _ScorePairs(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        ctx, hidden_PKD, output_WD, teacher, weight_PK, name = args
        steps = hidden_PKD.shape[1]
        table = output_WD.to(hidden_PKD.dtype)
        exact = torch.promote_types(hidden_PKD.dtype, torch.float32)
        weight_PK = weight_PK.to(exact)
        loss_PK, accept_PK = torch.empty_like(weight_PK), torch.empty_like(weight_PK)
        needs_hidden, needs_output = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_PKD) if needs_hidden else None
        grad_output = None
        size = max(1, CHUNK_ELEMENTS // (steps * table.shape[0]))
        for start in range(0, hidden_PKD.shape[0], size):
            rows = slice(start, start + size)
            hidden = hidden_PKD[rows].flatten(0, 1)
            logits_XW = hidden @ table.T
            probs = teacher_probs(teacher, rows)
            _score_chunk(logits_XW, probs, (loss_PK[rows], accept_PK[rows]), name)
            # Weights scale rows, so they touch the narrow factors and not the wide gradient.
            weight = weight_PK[rows].flatten().unsqueeze(1).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (logits_XW @ table).mul_(weight).unflatten(0, (-1, steps))
            if needs_output:
                part = (logits_XW.T @ (hidden * weight)).to(output_WD.dtype)
                grad_output = part if grad_output is None else grad_output.add_(part)
        if needs_output and grad_output is None:
            grad_output = torch.zeros_like(output_WD)
        ctx.save_for_backward(grad_hidden, grad_output)
        ctx.mark_non_differentiable(loss_PK, accept_PK)
        return (loss_PK * weight_PK).sum(), loss_PK, accept_PK

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grad = grads_out[0]
        grad_hidden, grad_output = ctx.saved_tensors
        # In place: these tensors serve this one call, and autograd refuses a second.
        if grad_hidden is not None:
            grad_hidden.mul_(grad.to(grad_hidden.dtype))
        if grad_output is not None:
            grad_output.mul_(grad.to(grad_output.dtype))
        return grad_hidden, grad_output, None, None, None


def _score_chunk(
    logits_XW: Tensor, probs_PW: Tensor, out: tuple[Tensor, Tensor], name: str
) -> None:
    """Fill losses and acceptances, and overwrite the logits with their gradient."""
    loss_PK, accept_PK = out
    steps, width = loss_PK.shape[1], logits_XW.shape[1]
    size = max(1, SLICE_ELEMENTS // (steps * width))
    for start in range(0, loss_PK.shape[0], size):
        rows = slice(start, start + size)
        part = logits_XW[start * steps : (start + size) * steps].unflatten(0, (-1, steps))
        logits = part.to(loss_PK.dtype)
        probs = probs_PW[rows].unsqueeze(1)
        if name in ("soft_ce", "kl"):
            scored, accept = _cross_entropy(logits, probs, name)
        else:
            scored = slope(name, logits, probs)
            accept = torch.minimum(logits.softmax(-1), probs).sum(-1)
        loss_PK[rows], accept_PK[rows] = scored.loss_N, accept
        part.copy_(scored.grad_NW)


def _cross_entropy(logits: Tensor, probs: Tensor, name: str) -> tuple[Slope, Tensor]:
    """Closed form of soft_ce and kl: the gradient is q - p, and min(p, q) sums to 1 - |q - p|/2."""
    top = logits.amax(-1, keepdim=True)
    dot = (logits @ probs.transpose(-1, -2)).squeeze(-1)
    grad = logits.softmax(-1)
    loss = (top - grad.amax(-1, keepdim=True).log()).squeeze(-1) - dot
    if name == "kl":
        loss = loss + torch.xlogy(probs, probs).sum(-1)
    grad.sub_(probs)
    return Slope(loss, grad), 1 - 0.5 * torch.linalg.vector_norm(grad, ord=1, dim=-1)
