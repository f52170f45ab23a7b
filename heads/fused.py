"""Output head, objective and their gradients in one pass over chunks of rows.

The gradient with respect to the logits is known as soon as the logits are, so both matrix products
of the backward pass run in the forward one and no [rows, vocabulary] tensor outlives its chunk.

The elementwise work runs in slices that stay in cache on a CPU, and compiled on a GPU.

Letters: P predicted tokens, K steps, D draft hidden size, H target hidden size, W draft vocabulary,
M divergences.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.heads.base import DraftHead
from outrider.heads.objective import Objective, saved_calls
from outrider.heads.slopes import Slope, slope
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
    bends_draft: bool = False
    """Whether the draft's logits get them too."""


class Scored(NamedTuple):
    """What a pass over the loss pairs yields; only `loss` carries a gradient."""

    loss: Tensor
    """Sum of weight times loss, and times what the place saves if the objective aims at that."""
    loss_PK: Tensor
    """Unweighted loss of every pair."""
    each_PKM: Tensor
    """Every divergence of every pair, without its weight in the objective."""
    accept_PK: Tensor
    """Sum of min(p, q) of every pair, over the draft vocabulary with p renormalised on it, at the
    objective's temperature."""


SOFT_CE = Objective()


def teacher_probs(
    teacher: Teacher | TopTeacher, rows: slice | None = None, temperature: float = 1.0
) -> Tensor:
    """The target's law over the draft vocabulary, renormalised there; [rows, W], fp32 or better."""
    if isinstance(teacher, TopTeacher):
        return teacher.probs(rows, temperature)
    state = teacher.state_PH if rows is None else teacher.state_PH[rows]
    logits = state.to(teacher.table_WH.dtype) @ teacher.table_WH.T
    exact = torch.promote_types(logits.dtype, torch.float32)
    scaled = bend(logits.to(exact), teacher.tables)
    return (scaled if temperature == 1 else scaled / temperature).softmax(-1)


def teacher_of(head: DraftHead, state_PH: Tensor, dtype: torch.dtype) -> Teacher:
    """The teacher of a head for given target states."""
    return Teacher(state_PH, head.teacher_rows(dtype), head.lent(), head.is_bent)


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
    objective: Objective = SOFT_CE,
) -> Scored:
    """Objective of every pair against its teacher, summed with weights (zero: not in the loss).

    hidden is what the output head multiplies (head.output_input), outputs its rows [W, D]
    (head.output_weights), one for all steps or one for each: fp32 master weights are fine, the
    products run in the dtype of hidden. The teacher's law is made once for all steps.
    """
    if len(outputs) not in (1, hidden_PKD.shape[1]):
        raise ValueError(
            f"{len(outputs)} output heads are given for {hidden_PKD.shape[1]} steps; give one for "
            "all of them, or one for each"
        )
    if objective.aim is not None and len(outputs) > 1:
        raise ValueError(
            f"aim is {objective.aim} and each draft step has an output head of its own; share one "
            "(--freeze-output), or leave aim out"
        )
    return Scored(*_ScorePairs.apply(hidden_PKD, teacher, weight_PK, objective, *outputs))


class _ScorePairs(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # noqa: ANN401
        ctx, hidden_PKD, teacher, weight_PK, objective, *outputs = args
        tables = [output_WD.to(hidden_PKD.dtype) for output_WD in outputs]
        exact = torch.promote_types(hidden_PKD.dtype, torch.float32)
        weight_PK = weight_PK.to(exact)
        if objective.aim is not None:
            weight_PK = weight_PK.clone()
        accept_PK = torch.empty_like(weight_PK)
        each_PKM = weight_PK.new_empty(*weight_PK.shape, len(objective.terms))
        needs_hidden, needs_outputs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        grad_hidden = torch.empty_like(hidden_PKD) if needs_hidden else None
        grads: list[Tensor | None] = [None] * len(outputs)
        steps = hidden_PKD.shape[1] // len(outputs)
        size = max(1, CHUNK_ELEMENTS // (steps * tables[0].shape[0]))
        for start in range(0, hidden_PKD.shape[0], size):
            rows = slice(start, start + size)
            probs = teacher_probs(teacher, rows, objective.temperature).to(exact)
            for index, table in enumerate(tables):
                span = (rows, slice(index * steps, (index + 1) * steps))
                hidden = hidden_PKD[span].flatten(0, 1)
                logits_XW = hidden @ table.T
                scorer = scorer_of(teacher, objective, is_compiled=logits_XW.is_cuda)
                _score_chunk(logits_XW, probs, (each_PKM[span], accept_PK[span]), scorer)
                # Weights scale rows, so they touch the narrow factors and not the wide gradient.
                if objective.aim is not None:
                    given = weight_PK[span]
                    given *= saved_calls(accept_PK[span], given != 0, objective.aim)
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
        loss_PK = each_PKM @ each_PKM.new_tensor(objective.weights)
        ctx.mark_non_differentiable(loss_PK, each_PKM, accept_PK)
        return (loss_PK * weight_PK).sum(), loss_PK, each_PKM, accept_PK

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grad = grads_out[0]
        found = ctx.saved_tensors
        # In place: these tensors serve this one call, and autograd refuses a second.
        for saved in found:
            if saved is not None:
                saved.mul_(grad.to(saved.dtype))
        return found[0], None, None, None, *found[1:]


Scorer = Callable[[Tensor, Tensor], Slope]


def scorer_of(teacher: Teacher | TopTeacher, objective: Objective, *, is_compiled: bool) -> Scorer:
    """The function of raw logits and the teacher's law that a chunk is scored with."""
    bent = (teacher.tables.logit_scale, teacher.tables.softcap) if teacher.bends_draft else None
    return (_compiled if is_compiled else _plain)(objective, bent)


def _plain(objective: Objective, bent: tuple[float, float | None] | None) -> Scorer:
    return partial(_score, objective=objective, bent=bent)


@cache
def _compiled(objective: Objective, bent: tuple[float, float | None] | None) -> Scorer:
    """One fused kernel or a few, for any number of rows."""
    return torch.compile(_plain(objective, bent), dynamic=True)


def _score(
    raw_PKW: Tensor,
    probs_P1W: Tensor,
    *,
    objective: Objective,
    bent: tuple[float, float | None] | None,
) -> Slope:
    """The objective and its gradient by raw logits, through the target's scale and cap if any."""
    if bent is None:
        return slope(raw_PKW, probs_P1W, objective)
    scale, cap = bent
    if cap is None:
        found = slope(raw_PKW * scale, probs_P1W, objective)
        return found._replace(grad_PKW=found.grad_PKW * scale)
    inner = torch.tanh(raw_PKW * (scale / cap))
    found = slope(cap * inner, probs_P1W, objective)
    return found._replace(grad_PKW=found.grad_PKW * (scale * (1 - inner**2)))


def _score_chunk(
    logits_XW: Tensor, probs_PW: Tensor, out: tuple[Tensor, Tensor], scorer: Scorer
) -> None:
    """Fill divergences and acceptances, and overwrite the logits with their gradient."""
    each_PKM, accept_PK = out
    steps, width = accept_PK.shape[1], logits_XW.shape[1]
    size = max(1, SLICE_ELEMENTS // (steps * width))
    if logits_XW.is_cuda:
        size = len(accept_PK)
    for start in range(0, accept_PK.shape[0], size):
        rows = slice(start, start + size)
        part = logits_XW[start * steps : (start + size) * steps].unflatten(0, (-1, steps))
        scored = scorer(part.to(accept_PK.dtype), probs_PW[rows].unsqueeze(1))
        each_PKM[rows], accept_PK[rows] = scored.each_PKM, scored.accept_PK
        part.copy_(scored.grad_PKW)
