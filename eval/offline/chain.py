"""Exact acceptance without decoding: one teacher-forced pass of the head over the target's text.

B rows, S tokens of prompt and answer, N (row, place) pairs, K drafts at most, D head width, V
target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.eval.offline.batching import (
    batches,
    check_chain_rule,
    check_lengths,
    check_match,
    side_by_side,
)
from outrider.eval.offline.coins import Contexts, chain_coins
from outrider.eval.offline.contexts import DraftVocabulary
from outrider.eval.offline.rounds import collect, joined
from outrider.eval.offline.scores import Score
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.heads import DraftHead
from outrider.heads.plan import RowPlan


def score_chain(
    head: DraftHead,
    trace: Trace,
    target: Target,
    *,
    lengths: Sequence[int] = (3,),
    rule: str | None = None,
    rows: Sequence[int] | None = None,
) -> dict[int, Score]:
    """Score chains of several lengths in one pass; the key of a score is its length.

    Args:
        head: The head, attached to the target's tables. It drafts no more than it can: a longer
            chain than that scores like the longest.
        trace: The target's own text with its states.
        target: Only its output head is used, and only for sampled text.
        lengths: Chain lengths to report, each 1 or more.
        rule: greedy, rejection, block, match or point_mass; by default greedy for greedy text and
            rejection for sampled text. match and point_mass verify argmax drafts.
        rows: Indices of trace rows to use; all by default.
    """
    rule = check_chain_rule(rule, trace.sampling)
    check_match(trace, target)
    depth = min(check_lengths(lengths), head.config.max_drafts)
    vocabulary = DraftVocabulary.of(head)
    parts: dict[int, list[Score]] = {length: [] for length in lengths}
    for batch in batches(trace, head.config.aux_layers, rows):
        drafts = HeadLogits.of(head, batch, depth)
        coins = chain_coins(drafts, batch, trace, target, vocabulary, rule=rule, depth=depth)
        collect(parts, batch, coins, rule, "chain:{}")
    return joined(parts, trace, rows)


class HeadLogits(NamedTuple):
    """Draft laws of a head for every round of a batch."""

    head: DraftHead
    hidden_KND: list[Tensor]

    @classmethod
    def of(cls, head: DraftHead, batch: Sequence[TraceRow], depth: int) -> "HeadLogits":
        """Unroll the head over the batch."""
        return cls(head, hidden_steps(head, batch, Contexts.of(batch), depth))

    def at(self, span_N: Tensor, n: Tensor, step: int) -> Tensor:
        """See `DraftLogits`; contexts of a row are consecutive, so the start is `step` before."""
        root_N = (span_N[n] - step).to(self.hidden_KND[step].device)
        return self.head.draft_logits(self.hidden_KND[step][root_N], step).float().cpu()

    def is_drafted(self, position: Tensor) -> Tensor:
        """As in decoding: no draft runs at a position that the head was not made for."""
        return position - 2 < self.head.config.max_position_embeddings


@torch.no_grad()
def hidden_steps(
    head: DraftHead, batch: Sequence[TraceRow], context: Contexts, depth: int
) -> list[Tensor]:
    """What the head carries for every start, [N, D] for each of its first `depth` drafts."""
    depth = min(depth, head.config.max_drafts)
    device = head.device
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
    return head.unroll(feature_BSD, ids_BS, position_BS.to(device), plan)
