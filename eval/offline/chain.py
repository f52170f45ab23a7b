"""Exact acceptance without decoding: one teacher-forced pass of the head over the target's text.

B rows, T places in the answer (0 is the prefill's token), S tokens of prompt and answer, N (row,
place) pairs, K drafts at most, L = K + 1 draft lengths, D head width, V target vocabulary, W draft
vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.batching import batches, check_match, check_rule, side_by_side
from outrider.eval.offline.contexts import DraftVocabulary, Place, target_law
from outrider.eval.offline.renewal import Renewal, renewal, survival
from outrider.eval.offline.scores import PLACE_BIN, Score, join
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.heads import EagleHead
from outrider.heads.plan import RowPlan
from outrider.heads.unroll import unroll

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

    def where(self, is_drafted: Tensor) -> "Coins":
        """The same with nothing accepted where nothing is drafted."""
        first, alpha, best = (part * is_drafted for part in self[:3])
        return Coins(first, alpha, best, self.inside, self.top_inside)


def score_chain(
    head: EagleHead,
    trace: Trace,
    target: Target,
    *,
    lengths: Sequence[int] = (3,),
    rule: str | None = None,
    rows: Sequence[int] | None = None,
) -> dict[int, Score]:
    """Score chains of several lengths in one pass; the key of a score is its length.

    Args:
        head: The head, attached to the target's tables.
        trace: The target's own text with its states.
        target: Only its output head is used, and only for sampled text.
        lengths: Chain lengths to report, each 1 or more.
        rule: greedy, rejection, match or point_mass; by default greedy for greedy text and
            rejection for sampled text. The last two verify argmax drafts.
        rows: Indices of trace rows to use; all by default.
    """
    rule = check_rule(rule, trace.sampling)
    check_match(trace, target)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths is {list(lengths)}; give chain lengths of 1 or more")
    depth = max(lengths)
    parts: dict[int, list[Score]] = {length: [] for length in lengths}
    for batch in batches(trace, head, rows):
        coins = _coins(head, batch, target, trace.sampling, rule, depth)
        tokens_B = torch.tensor([row.num_tokens for row in batch])
        solved = renewal(coins.accept, tokens_B)
        for length in parts:
            parts[length].append(_score(batch, coins, solved, tokens_B, length, rule))
    wanted = [trace.row_ids[i] for i in (range(len(trace)) if rows is None else rows)]
    return {length: in_order(join(found), wanted) for length, found in parts.items()}


def in_order(score: Score, row_ids: Sequence[str]) -> Score:
    """The score with its prompts in this order."""
    place = {name: i for i, name in enumerate(score.row_ids)}
    return score.take([place[name] for name in row_ids])


@torch.no_grad()
def _coins(
    head: EagleHead,
    batch: Sequence[TraceRow],
    target: Target,
    sampling: Sampling,
    rule: str,
    depth: int,
) -> Coins:
    context = Contexts.of(batch)
    hidden_KND = hidden_steps(head, batch, context, depth)
    vocabulary = DraftVocabulary.of(head)
    num_places = max(row.num_tokens for row in batch)
    tables = Coins(*(torch.zeros(len(batch), num_places, depth) for _ in Coins._fields))
    for first in range(0, len(context.row_N), _CHUNK):
        span_N = torch.arange(first, min(first + _CHUNK, len(context.row_N)))
        judge = _Judge(batch, context, span_N, vocabulary, target, sampling)
        for step in range(depth):
            # The draft of depth `step` for a context belongs to the round that started before.
            n = (context.place_N[span_N] > step).nonzero()[:, 0]
            root_N = (span_N[n] - step).to(hidden_KND[step].device)
            logits_NW = head.draft_logits(hidden_KND[step][root_N]).float().cpu()
            found = judge.coins(n, logits_NW, rule)
            # As in decoding: no draft runs at a position that the head was not made for.
            is_drafted_N = context.position_N[span_N[n]] - 2 < head.config.max_position_embeddings
            found = found._replace(
                **{
                    name: getattr(found, name) * is_drafted_N
                    for name in ("accept", "alpha", "best")
                }
            )
            row_N = context.row_N[span_N[n]]
            start_N = context.place_N[span_N[n]] - step
            for table, value_N in zip(tables, found, strict=True):
                table[row_N, start_N, step] = value_N.to(table.dtype)
    return tables


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


def hidden_steps(
    head: EagleHead, batch: Sequence[TraceRow], context: Contexts, depth: int
) -> list[Tensor]:
    """The head's output for every start, step by step: depth times [N, D]."""
    device = head.fc.weight.device
    ids_BS, aux_BSF, last_BSH = (
        side_by_side(batch, name).to(device) for name in ("ids_T", "aux_TF", "last_TH")
    )
    position_BS = torch.arange(ids_BS.shape[1]).expand(ids_BS.shape)
    length_B1 = torch.tensor([[len(row.ids_T)] for row in batch])
    document_BS = (position_BS < length_B1).long()
    # A round at place t has root row t - 2: state of the token before last, last token as input.
    root_N = context.row_N * ids_BS.shape[1] + context.position_N - 2
    plan = RowPlan.from_rows(root_N, document_BS, depth).to(device)
    feature_BSD = head.project(aux_BSF, last_BSH)
    return unroll(head, feature_BSD, ids_BS, position_BS.to(device), plan)


class _Judge:
    """The target's law at some contexts, kept while drafts of every depth are judged by it."""

    def __init__(
        self,
        batch: Sequence[TraceRow],
        context: Contexts,
        span_N: Tensor,
        vocabulary: DraftVocabulary,
        target: Target,
        sampling: Sampling,
    ) -> None:
        rows = [batch[b] for b in context.row_N[span_N].tolist()]
        position_N = context.position_N[span_N]
        pairs = zip(rows, position_N.tolist(), strict=True)
        places = [Place(row.ids_T, position, row.prompt_length) for row, position in pairs]
        self.temperature = sampling.temperature
        self.ids_N = torch.stack([ids_S[position] for ids_S, position, _ in places])
        self.slot_N = vocabulary.slot_V[self.ids_N]
        self.ids_W = vocabulary.ids_W
        self.probs_NW: Tensor | None = None
        self.chance_N = torch.ones(len(rows))
        if sampling.is_greedy:
            # Greedy text is its own law: one-hot at the token that decoding took.
            self.inside_N = (self.slot_N >= 0).float()
            self.top_inside_N = self.inside_N
            return
        pairs = zip(rows, position_N.tolist(), strict=True)
        last_NH = torch.stack([row.last_TH[position - 1] for row, position in pairs])
        probs_NV = target_law(target, last_NH, places, sampling).probs_NV
        is_inside_V = vocabulary.is_inside
        self.chance_N = _possible(probs_NV.gather(-1, self.ids_N[:, None])[:, 0], rows)
        self.probs_NW = probs_NV[:, self.ids_W]
        self.inside_N = probs_NV[:, is_inside_V].sum(-1)
        self.top_inside_N = is_inside_V[probs_NV.argmax(-1)].float()

    def coins(self, n: Tensor, logits_NW: Tensor, rule: str) -> Coins:
        """Judge the drafts with these logits at the contexts `n` of this chunk."""
        slot_N, inside = self.slot_N[n], (self.inside_N[n], self.top_inside_N[n])
        drafted_N = logits_NW.argmax(-1)
        if self.probs_NW is None:
            hit_N = (drafted_N == slot_N).float()
            return Coins(hit_N, hit_N, hit_N, *inside)
        probs_NW = self.probs_NW[n]
        if rule != "rejection":
            kept_N = probs_NW.gather(-1, drafted_N[:, None])[:, 0]
            return Coins((drafted_N == slot_N).float(), kept_N, kept_N, *inside)
        draft_NW = (logits_NW / self.temperature).softmax(-1)
        q_N = draft_NW.gather(-1, slot_N.clamp(min=0)[:, None])[:, 0] * (slot_N >= 0)
        kept_N = torch.minimum(probs_NW, draft_NW).sum(-1)
        return Coins((q_N / self.chance_N[n]).clamp(max=1), kept_N, kept_N, *inside)


def _possible(chance_N: Tensor, rows: Sequence[TraceRow]) -> Tensor:
    if (chance_N <= 0).any():
        row = rows[int((chance_N <= 0).nonzero()[0, 0])]
        raise ValueError(
            f"trace row {row.row_id!r} holds a token of probability zero under the trace's "
            "sampling; build the trace again from the target's own text"
        )
    return chance_N


def _score(
    batch: Sequence[TraceRow],
    coins: Coins,
    solved: Renewal,
    tokens_B: Tensor,
    length: int,
    rule: str,
) -> Score:
    num_places = coins.accept.shape[1]
    place_T1 = torch.arange(num_places)[:, None]
    inside_BTK = place_T1 + torch.arange(length) < tokens_B[:, None, None]
    visits_BT = solved.visits_BLT[:, length]
    reach_BTJ = survival(coins.accept.double())
    weight_BTK = visits_BT[..., None] * reach_BTJ[..., :length] * inside_BTK

    def weighed(table: Tensor) -> np.ndarray:
        return (weight_BTK * table[..., :length]).sum(1).numpy()

    rounds_R = solved.rounds_BL[:, length].numpy()
    is_token_BT = (torch.arange(num_places) < tokens_B[:, None]).double()
    return Score(
        draft=f"chain:{length}",
        rule=rule,
        row_ids=tuple(row.row_id for row in batch),
        kinds=tuple(row.kind for row in batch),
        tokens_R=(tokens_B - 1).double().numpy(),
        rounds_R=rounds_R,
        drafted_R=rounds_R * length,
        judged_RK=weight_BTK.sum(1).numpy(),
        kept_RK=weighed(coins.alpha),
        hit_RK=weighed(coins.accept),
        best_RK=weighed(coins.best),
        inside_RK=weighed(coins.inside),
        top_inside_RK=weighed(coins.top_inside),
        tokens_RP=by_bin(is_token_BT),
        starts_RP=by_bin(visits_BT),
    )


def by_bin(value_BT: Tensor) -> np.ndarray:
    """Sums over bins of places; place 0, the prefill's token, is left out."""
    return np.stack([part.sum(1).numpy() for part in value_BT[:, 1:].split(PLACE_BIN, dim=1)], 1)
