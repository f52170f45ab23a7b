"""Exact acceptance of prompt lookup: the text so far decides every draft, so a walk is enough."""

from collections.abc import Sequence

import torch

from outrider.data.target import Target
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.offline.batching import check_match, check_rule
from outrider.eval.offline.chain import in_order
from outrider.eval.offline.contexts import DraftVocabulary
from outrider.eval.offline.scores import Score, join
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.offline.walks import Walk, score_walks
from outrider.eval.trees.plans import LookupPlan


def score_lookup(
    trace: Trace,
    target: Target,
    plan: LookupPlan,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
) -> Score:
    """Score prompt lookup on a trace; its drafts are chosen, so all rules accept alike."""
    rule = rule or ("greedy" if trace.sampling.is_greedy else "match")
    rule = check_rule(rule, trace.sampling)
    check_match(trace, target)
    wanted = range(len(trace)) if rows is None else rows
    ids_V = torch.arange(target.vocab_size)
    vocabulary = DraftVocabulary(ids_V, ids_V)
    parts = []
    for index in wanted:
        walk = walked(trace.row(index, ()), plan)
        parts.append(score_walks(vocabulary, [walk], target, trace.sampling, plan, rule))
    return in_order(join(parts), [trace.row_ids[index] for index in wanted])


def walked(row: TraceRow, plan: LookupPlan) -> Walk:
    """Rounds from the prefill's token to the end of the answer."""
    drafter, walk = PromptLookup(plan), Walk(row)
    ids = row.ids_T.tolist()
    known = row.prompt_length + 1
    drafter.start(ids[:known], None)
    while not walk.is_done:
        # No draft reaches past the text's end: decoding's length limit holds it there.
        walk.follow(drafter.propose(row.num_tokens - walk.place, None).tree)
        drafter.accept(ids[known : row.prompt_length + walk.place], None)
        known = row.prompt_length + walk.place
    return walk
