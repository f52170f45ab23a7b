"""Exact acceptance of drafters that read the text alone: prompt lookup and suffix drafting.

Their drafts are chosen, so the text decides every round; every start is drafted once, and shorter
drafts are beginnings of longer ones. T places in the answer, K drafts at most, N contexts.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.eval.drafters.by_plan import text_drafter
from outrider.eval.offline.batching import check_lengths, check_match, check_rule
from outrider.eval.offline.coins import Coins, Contexts, Judge, empty_coins
from outrider.eval.offline.contexts import DraftVocabulary
from outrider.eval.offline.rounds import collect, joined
from outrider.eval.offline.scores import Score
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.trees.plans import TextPlan


def score_lookup(
    trace: Trace,
    target: Target,
    plan: TextPlan,
    *,
    lengths: Sequence[int] | None = None,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
) -> dict[int, Score]:
    """Score prompt lookup or suffix drafting on a trace, by length of the draft.

    `lengths` are those to report, by default the plan's own. All rules accept chosen drafts alike.
    """
    rule = rule or ("greedy" if trace.sampling.is_greedy else "match")
    rule = check_rule(rule, trace.sampling)
    check_match(trace, target)
    lengths = [plan.length] if lengths is None else lengths
    plan = replace(plan, length=check_lengths(lengths))
    form = plan.label.replace(f":{plan.length}", ":{}", 1)
    parts: dict[int, list[Score]] = {length: [] for length in lengths}
    for index in range(len(trace)) if rows is None else rows:
        row = trace.row(index, ())
        coins = _coins(row, drafts_of(row, plan), target, trace)
        collect(parts, [row], coins, rule, form)
    return joined(parts, trace, rows)


def drafts_of(row: TraceRow, plan: TextPlan) -> Tensor:
    """What a round that starts at each place drafts, [T, K]; -1 where it drafts nothing."""
    drafter, ids = text_drafter(plan), row.ids_T.tolist()
    found_TK = torch.full((row.num_tokens, plan.length), -1)
    known = row.prompt_length + 1
    drafter.start(ids[:known], None)
    for place in range(1, row.num_tokens):
        tokens = drafter.propose(plan.length, None).tree.tokens[1:]
        found_TK[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        drafter.accept(ids[known : known + 1], None)
        known += 1
    return found_TK


@torch.no_grad()
def _coins(row: TraceRow, drafts_TK: Tensor, target: Target, trace: Trace) -> Coins:
    depth = drafts_TK.shape[1]
    tables, context = empty_coins([row], depth), Contexts.of([row])
    ids_V = torch.arange(target.vocab_size)
    vocabulary = DraftVocabulary(ids_V, ids_V)
    is_drafted_TK = drafts_TK >= 0
    tables.is_drafted[0] = is_drafted_TK.float()
    for span_N in context.chunks():
        judge = Judge([row], context, span_N, vocabulary, target, trace)
        for step in range(depth):
            n = (context.place_N[span_N] > step).nonzero()[:, 0]
            start_N = context.place_N[span_N[n]] - step
            n, start_N = (part[is_drafted_TK[start_N, step]] for part in (n, start_N))
            draft_N = drafts_TK[start_N, step]
            hit_N = (draft_N == judge.ids_N[n]).float()
            kept_N = hit_N
            if judge.probs_NV is not None:
                kept_N = judge.probs_NV[n].gather(-1, draft_N[:, None])[:, 0]
            figures = (hit_N, kept_N, kept_N, judge.inside_N[n], judge.top_inside_N[n])
            for table, value_N in zip(tables[:5], figures, strict=True):
                table[0, start_N, step] = value_N
    return tables
