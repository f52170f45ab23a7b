"""Exact acceptance of an independent draft model: one pass of it over the target's text.

The model reads the text alone, so its law at a place is the same for every round that gets there.
B rows, S tokens of a row, N contexts, H hidden size of the draft model, W draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.eval.drafters.model import DraftModel
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


def score_model(
    model: DraftModel,
    trace: Trace,
    target: Target,
    *,
    lengths: Sequence[int] = (3,),
    rule: str | None = None,
    rows: Sequence[int] | None = None,
) -> dict[int, Score]:
    """Score chains that a draft model drafts, by length; see `score_chain`."""
    rule = check_chain_rule(rule, trace.sampling)
    check_match(trace, target)
    depth = check_lengths(lengths)
    ids_W = torch.arange(model.num_ids)
    slot_V = torch.full((target.vocab_size,), -1)
    slot_V[: model.num_ids] = ids_W
    vocabulary = DraftVocabulary(ids_W, slot_V)
    parts: dict[int, list[Score]] = {length: [] for length in lengths}
    for batch in batches(trace, (), rows):
        drafts = ModelLogits(model, batch)
        coins = chain_coins(drafts, batch, trace, target, vocabulary, rule=rule, depth=depth)
        collect(parts, batch, coins, rule, "chain:{}")
    return joined(parts, trace, rows)


class ModelLogits:
    """Draft laws of a model at every context of a batch."""

    @torch.no_grad()
    def __init__(self, model: DraftModel, batch: Sequence[TraceRow]) -> None:
        self._model = model
        # Padding sits on the right, where a causal model cannot see it.
        ids_BS = side_by_side(batch, "ids_T").to(model.model.device)
        last_BSH = model.model.run(ids_BS[:, : model.limit]).last_BTH
        context = Contexts.of(batch)
        before_N = (context.position_N - 1).clamp(max=last_BSH.shape[1] - 1)
        self._last_NH = last_BSH[context.row_N, before_N]
        self._kept: tuple[int, Tensor] | None = None

    def at(self, span_N: Tensor, n: Tensor, step: int) -> Tensor:  # noqa: ARG002
        """See `DraftLogits`; made once for all steps of a span."""
        first = int(span_N[0])
        if self._kept is None or self._kept[0] != first:
            self._kept = first, self._model.logits(self._last_NH[span_N]).cpu()
        return self._kept[1][n]

    def is_drafted(self, position: Tensor) -> Tensor:
        """As in decoding: the model runs up to the token before, within its positions."""
        return position <= self._model.limit
