"""What happens to each draft of a chain in each round that could be: tables of chances.

B rows, T places in the answer (0 is the prefill's token), N contexts (row, place), K drafts at
most, W draft vocabulary, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.eval.offline.contexts import DraftVocabulary, Place, target_law
from outrider.eval.offline.traces import Trace, TraceRow

_CHUNK = 128


class Coins(NamedTuple):
    """What happens to draft i of a round that starts at place t: each [B, T, K]."""

    accept: Tensor
    """Chance that the text's own token is accepted."""
    alpha: Tensor
    """Chance of acceptance under the target's law."""
    best: Tensor
    """The most that any exact rule could accept with the same draft law."""
    inside: Tensor
    """The target's mass inside the draft vocabulary."""
    top_inside: Tensor
    """Whether the target's likeliest token is inside the draft vocabulary."""
    is_drafted: Tensor
    """Whether there is a draft at all."""


class Contexts(NamedTuple):
    """Every place after the prefill's token, row by row; also every place a round can start at."""

    row_N: Tensor
    place_N: Tensor
    position_N: Tensor
    """Index of the place's token in prompt and answer together."""

    @classmethod
    def of(cls, batch: Sequence[TraceRow]) -> "Contexts":
        places = [torch.arange(1, row.num_tokens) for row in batch]
        rows = [torch.full_like(place_T, b) for b, place_T in enumerate(places)]
        prompts = [place_T + row.prompt_length for place_T, row in zip(places, batch, strict=True)]
        return cls(torch.cat(rows), torch.cat(places), torch.cat(prompts))

    def chunks(self) -> Iterator[Tensor]:
        """Indices of a few contexts at a time, in order: laws over V are wide."""
        for first in range(0, len(self.row_N), _CHUNK):
            yield torch.arange(first, min(first + _CHUNK, len(self.row_N)))


class DraftLogits(Protocol):
    """Where a chain's draft laws come from."""

    def at(self, span_N: Tensor, n: Tensor, step: int) -> Tensor:
        """Logits [n, W] of draft number `step` at the contexts `span_N[n]`, fp32 on the CPU.

        The draft belongs to the round that started `step` places before and took the text's tokens.
        """
        ...

    def is_drafted(self, position: Tensor) -> Tensor:
        """Whether the token at such a position of the row is drafted: the drafter has an end."""
        ...


@torch.no_grad()
def chain_coins(
    drafts: DraftLogits,
    batch: Sequence[TraceRow],
    trace: Trace,
    target: Target,
    vocabulary: DraftVocabulary,
    *,
    rule: str,
    depth: int,
) -> Coins:
    """The tables of a chain that is drawn (rejection, block) or takes the likeliest tokens."""
    context = Contexts.of(batch)
    tables = empty_coins(batch, depth)
    tables = tables._replace(is_drafted=drafts.is_drafted(_positions(batch, depth)).float())
    # q / p at the text's token, for rules that look at the round so far.
    ratio_BTK = torch.zeros_like(tables.accept)
    for span_N in context.chunks():
        judge = Judge(batch, context, span_N, vocabulary, target, trace)
        for step in range(depth):
            # The draft of depth `step` for a context belongs to the round that started before.
            n = (context.place_N[span_N] > step).nonzero()[:, 0]
            n = n[drafts.is_drafted(context.position_N[span_N[n]])]
            if not len(n):
                continue
            row_N, start_N = context.row_N[span_N[n]], context.place_N[span_N[n]] - step
            credit_N = None
            if rule == "block":
                # Contexts come in order, so what the round did before is known.
                credit_N = block_credit(ratio_BTK[row_N, start_N, :step])
            found, ratio_N = judge.coins(n, drafts.at(span_N, n, step), rule, credit_N)
            ratio_BTK[row_N, start_N, step] = ratio_N
            for name, value_N in found.items():
                table = getattr(tables, name)
                table[row_N, start_N, step] = value_N.to(table.dtype)
    return tables


def empty_coins(batch: Sequence[TraceRow], depth: int) -> Coins:
    """Tables of zeros."""
    num_places = max(row.num_tokens for row in batch)
    return Coins(*(torch.zeros(len(batch), num_places, depth) for _ in Coins._fields))


def _positions(batch: Sequence[TraceRow], depth: int) -> Tensor:
    """Position in the row of each draft's token, [B, T, K]."""
    num_places = max(row.num_tokens for row in batch)
    place_TK = torch.arange(num_places)[:, None] + torch.arange(depth)
    prompt_B = torch.tensor([row.prompt_length for row in batch])
    return prompt_B[:, None, None] + place_TK


def block_credit(ratio_NI: Tensor) -> Tensor:
    """How much more than q a block of drafts may still claim: P / S, 1 or more, [N].

    Given the text, block verification (rule R9) accepts at least l drafts with chance
    S(l) = min over j <= l of P(j), P(j) the product of the first j ratios q/p at the text's tokens,
    P(0) = 1. So the draft after l of them is accepted with chance min(1, P(l)/S(l) q/p).
    """
    product_NJ = torch.nn.functional.pad(ratio_NI.double().cumprod(-1), (1, 0), value=1.0)
    least_N = product_NJ.min(-1).values
    return torch.where(least_N > 0, product_NJ[:, -1] / least_N, 1.0).to(ratio_NI.dtype)


class Drawn(NamedTuple):
    """What a rule of drawn chains does at a context."""

    accept_N: Tensor
    """Chance that the text's token is accepted."""
    alpha_N: Tensor
    """Chance that the draft is."""
    ratio_N: Tensor
    """q/p at the text's token."""


def drawn_chances(
    probs_NW: Tensor,
    draft_NW: Tensor,
    text_p_N: Tensor,
    text_q_N: Tensor,
    credit_N: Tensor | None = None,
) -> Drawn:
    """Rejection (rule R1), or block verification (R9) with the `block_credit` of earlier drafts.

    `probs_NW` and `draft_NW` are p and q on the draft vocabulary, `text_p_N` and `text_q_N` theirs
    at the text's token.
    """
    # Off-policy text may hold tokens that the target never emits, nor any rule accepts.
    ratio_N = torch.where(text_p_N > 0, text_q_N / text_p_N, 0.0)
    credit_N = torch.ones_like(ratio_N) if credit_N is None else credit_N
    alpha_N = torch.minimum(probs_NW, draft_NW * credit_N[:, None]).sum(-1)
    return Drawn((ratio_N * credit_N).clamp(max=1), alpha_N, ratio_N)


class Judge:
    """The target's law at some contexts, kept while drafts of every depth are judged by it."""

    def __init__(
        self,
        batch: Sequence[TraceRow],
        context: Contexts,
        span_N: Tensor,
        vocabulary: DraftVocabulary,
        target: Target,
        trace: Trace,
    ) -> None:
        rows = [batch[b] for b in context.row_N[span_N].tolist()]
        pairs = list(zip(rows, context.position_N[span_N].tolist(), strict=True))
        places = [Place(row.ids_T, position, row.prompt_length) for row, position in pairs]
        sampling = trace.sampling
        self.temperature = sampling.temperature
        self.ids_N = torch.stack([ids_S[position] for ids_S, position, _ in places])
        self.slot_N = vocabulary.slot_V[self.ids_N]
        self._ids_W = vocabulary.ids_W
        self.probs_NV: Tensor | None = None
        self._probs_NW: Tensor | None = None
        self._chance_N = torch.ones(len(rows))
        if sampling.is_greedy:
            # Greedy text is its own law: one-hot at the token that decoding took.
            self.inside_N = (self.slot_N >= 0).float()
            self.top_inside_N = self.inside_N
            return
        last_NH = torch.stack([row.last_TH[position - 1] for row, position in pairs])
        probs_NV = target_law(target, last_NH, places, sampling).probs_NV
        is_inside_V = vocabulary.is_inside
        self._chance_N = probs_NV.gather(-1, self.ids_N[:, None])[:, 0]
        if not trace.policy.is_off:
            _check_possible(self._chance_N, rows)
        self.probs_NV = probs_NV
        self.inside_N = probs_NV[:, is_inside_V].sum(-1)
        self.top_inside_N = is_inside_V[probs_NV.argmax(-1)].float()

    def coins(
        self, n: Tensor, logits_NW: Tensor, rule: str, credit_N: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Chances at the contexts `n` of this chunk for drafts with these logits, and q/p.

        `credit_N` multiplies q: see `block_credit`.
        """
        slot_N = self.slot_N[n]
        inside = {"inside": self.inside_N[n], "top_inside": self.top_inside_N[n]}
        drafted_N = logits_NW.argmax(-1)
        hit_N = (drafted_N == slot_N).float()
        if self.probs_NV is None:
            return {"accept": hit_N, "alpha": hit_N, "best": hit_N, **inside}, hit_N
        if self._probs_NW is None:
            self._probs_NW = self.probs_NV[:, self._ids_W]
        probs_NW = self._probs_NW[n]
        if rule not in DRAWN_RULES:
            kept_N = probs_NW.gather(-1, drafted_N[:, None])[:, 0]
            return {"accept": hit_N, "alpha": kept_N, "best": kept_N, **inside}, hit_N
        draft_NW = (logits_NW / self.temperature).softmax(-1)
        q_N = draft_NW.gather(-1, slot_N.clamp(min=0)[:, None])[:, 0] * (slot_N >= 0)
        found = drawn_chances(probs_NW, draft_NW, self._chance_N[n], q_N, credit_N)
        kept_N = found.alpha_N
        return {"accept": found.accept_N, "alpha": kept_N, "best": kept_N, **inside}, found.ratio_N


DRAWN_RULES = ("rejection", "block")
"""Rules of chains whose tokens are drawn."""


def _check_possible(chance_N: Tensor, rows: Sequence[TraceRow]) -> None:
    if (chance_N <= 0).any():
        row = rows[int((chance_N <= 0).nonzero()[0, 0])]
        raise ValueError(
            f"trace row {row.row_id!r} holds a token of probability zero under the trace's "
            "sampling; build the trace again from the target's own text"
        )
