"""Output head, objective and their gradients in one pass over chunks of rows.

The gradient with respect to the logits is known as soon as the logits are, so both matrix products
of the backward pass run in the forward one and no [rows, vocabulary] tensor outlives its chunk.

Letters: P predicted tokens, K steps, D draft hidden size, H target hidden size, W draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.heads.base import DraftHead
from outrider.heads.losses import Slope, objective, slope
from outrider.heads.tables import Tables, bend
from outrider.heads.top_teacher import TopTeacher

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


def teacher_probs(teacher: Teacher | TopTeacher, rows: slice | None = None) -> Tensor:
    """The target's law over the draft vocabulary, renormalised there; [rows, W], fp32 or better."""
    if isinstance(teacher, TopTeacher):
        return teacher.probs(rows)
    state = teacher.state_PH if rows is None else teacher.state_PH[rows]
    logits = state.to(teacher.table_WH.dtype) @ teacher.table_WH.T
    exact = torch.promote_types(logits.dtype, torch.float32)
    return bend(logits.to(exact), teacher.tables).softmax(-1)


def teacher_of(head: DraftHead, state_PH: Tensor, dtype: torch.dtype) -> Teacher:
    """The teacher of a head for given target states."""
    return Teacher(state_PH, head.teacher_rows(dtype), head.lent())


def best_is_inside(head: DraftHead, state_PH: Tensor, chunk: int = 1024) -> Tensor:
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
    outputs: Sequence[Tensor],
    teacher: Teacher | TopTeacher,
    weight_PK: Tensor,
    name: str = "soft_ce",
) -> Scored:
    """Objective of every pair against its teacher, summed with weights (zero: not in the loss).

    hidden is what the output head multiplies (head.output_input), outputs its rows [W, D]
    (head.output_weights), one for all steps or one for each: fp32 master weights are fine, the
    products run in the dtype of hidden. The teacher's law is made once for all steps.
    """
    objective(name)
    if len(outputs) not in (1, hidden_PKD.shape[1]):
        raise ValueError(
            f"{len(outputs)} output heads are given for {hidden_PKD.shape[1]} steps; give one for "
            "all of them, or one for each"
        )
    return Scored(*_ScorePairs.apply(hidden_PKD, teacher, weight_PK, name, *outputs))


class _ScorePairs(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        ctx, hidden_PKD, teacher, weight_PK, name, *outputs = args
        tables = [output_WD.to(hidden_PKD.dtype) for output_WD in outputs]
        exact = torch.promote_types(hidden_PKD.dtype, torch.float32)
        weight_PK = weight_PK.to(exact)
        loss_PK, accept_PK = torch.empty_like(weight_PK), torch.empty_like(weight_PK)
        needs_hidden, needs_outputs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        grad_hidden = torch.empty_like(hidden_PKD) if needs_hidden else None
        grads: list[Tensor | None] = [None] * len(outputs)
        steps = hidden_PKD.shape[1] // len(outputs)
        size = max(1, CHUNK_ELEMENTS // (steps * tables[0].shape[0]))
        for start in range(0, hidden_PKD.shape[0], size):
            rows = slice(start, start + size)
            probs = teacher_probs(teacher, rows)
            for index, table in enumerate(tables):
                span = (rows, slice(index * steps, (index + 1) * steps))
                hidden = hidden_PKD[span].flatten(0, 1)
                logits_XW = hidden @ table.T
                _score_chunk(logits_XW, probs, (loss_PK[span], accept_PK[span]), name)
                # Weights scale rows, so they touch the narrow factors and not the wide gradient.
                weight = weight_PK[span].flatten().unsqueeze(1).to(hidden.dtype)
                if grad_hidden is not None:
                    back = (logits_XW @ table).mul_(weight)
                    grad_hidden[span] = back.unflatten(0, (-1, steps))
                if needs_outputs[index]:
                    part = (logits_XW.T @ (hidden * weight)).to(outputs[index].dtype)
                    known = grads[index]
                    grads[index] = part if known is None else known.add_(part)
        for index, output_WD in enumerate(outputs):
            if needs_outputs[index] and grads[index] is None:
                grads[index] = torch.zeros_like(output_WD)
        ctx.save_for_backward(grad_hidden, *grads)
        ctx.mark_non_differentiable(loss_PK, accept_PK)
        return (loss_PK * weight_PK).sum(), loss_PK, accept_PK

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grad = grads_out[0]
        found = ctx.saved_tensors
        # In place: these tensors serve this one call, and autograd refuses a second.
        for saved in found:
            if saved is not None:
                saved.mul_(grad.to(saved.dtype))
        return found[0], None, None, None, *found[1:]


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
