"""Every draft of one drafter on one trace, each scored by what is exact for it."""

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from outrider.data.target import Target
from outrider.eval.drafters.model import DraftModel
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.lookup import score_lookup
from outrider.eval.offline.model import score_model
from outrider.eval.offline.scores import Score
from outrider.eval.offline.traces import Trace
from outrider.eval.offline.tree import score_tree
from outrider.eval.rules import rule_named
from outrider.eval.trees.plans import (
    ChainPlan,
    DrawnPlan,
    LikeliestPlan,
    LookupPlan,
    SuffixPlan,
    TextPlan,
    plan_named,
)
from outrider.heads import DraftHead

Scored: TypeAlias = ChainPlan | LikeliestPlan | TextPlan
"""Plans with an exact offline score."""


def score_drafts(
    drafter: DraftHead | DraftModel | None,
    trace: Trace,
    target: Target,
    drafts: Sequence[str],
    *,
    rule: str | None = None,
    tree_rows: Sequence[int] | None = None,
) -> dict[str, Score]:
    """Scores by draft, of those drafts that are this drafter's; None drafts from the text alone.

    All lengths of a chain, of a lookup or of a suffix are scored in one pass. A draft model is
    left out of trees, with a warning. Raises ValueError for drawn trees, which have no offline
    score, and for a rule that does not fit the text.

    Args:
        drafter: A head, a draft model, or None for prompt lookup and suffix drafting.
        trace: The target's own text.
        target: Its target.
        drafts: Draft plans as they are written.
        rule: For sampled text; one that judges drawn chains leaves other drafts to `match`.
        tree_rows: Rows of the trace that trees are scored on; all by default.
    """
    plans = {draft: scored_plan(draft) for draft in drafts}
    rule = None if trace.sampling.is_greedy else rule
    chosen_rule = None if rule and rule_named(rule).draws_drafts else rule
    if drafter is None:
        return _text_scores(trace, target, plans, chosen_rule)
    found = _chain_scores(drafter, trace, target, plans, rule)
    for draft, plan in plans.items():
        if isinstance(plan, ChainPlan | LookupPlan | SuffixPlan):
            continue
        if isinstance(drafter, DraftModel):
            warnings.warn(
                f"{draft} is left out for {drafter.model.name}: a draft model drafts chains",
                stacklevel=2,
            )
            continue
        score = score_tree(drafter, trace, target, plan, rule=chosen_rule, rows=tree_rows)
        found[draft] = replace(score, draft=draft)
    return {draft: found[draft] for draft in drafts if draft in found}


def _chain_scores(
    drafter: DraftHead | DraftModel,
    trace: Trace,
    target: Target,
    plans: Mapping[str, Scored],
    rule: str | None,
) -> dict[str, Score]:
    lengths = {draft: one.length for draft, one in plans.items() if isinstance(one, ChainPlan)}
    if not lengths:
        return {}
    wanted = list(lengths.values())
    if isinstance(drafter, DraftModel):
        scores = score_model(drafter, trace, target, lengths=wanted, rule=rule)
    else:
        scores = score_chain(drafter, trace, target, lengths=wanted, rule=rule)
    return {draft: replace(scores[length], draft=draft) for draft, length in lengths.items()}


def _text_scores(
    trace: Trace, target: Target, plans: Mapping[str, Scored], rule: str | None
) -> dict[str, Score]:
    texts = {d: one for d, one in plans.items() if isinstance(one, LookupPlan | SuffixPlan)}
    alike: dict[TextPlan, list[int]] = {}
    for plan in texts.values():
        alike.setdefault(replace(plan, length=1), []).append(plan.length)
    scores = {
        plan: score_lookup(trace, target, plan, lengths=lengths, rule=rule)
        for plan, lengths in alike.items()
    }
    return {
        draft: replace(scores[replace(plan, length=1)][plan.length], draft=draft)
        for draft, plan in texts.items()
    }


def is_text_draft(draft: str) -> bool:
    """Whether a draft needs neither a head nor a model."""
    return isinstance(plan_named(draft), LookupPlan | SuffixPlan)


def some_rows(trace: Trace, count: int | None, seed: int) -> list[int] | None:
    """Whole texts drawn at random, in the trace's order; None for all of them.

    The same texts for every head, so that differences stay paired.
    """
    if count is None or count >= len(trace):
        return None
    return sorted(random.Random(seed).sample(range(len(trace)), count))


def scored_plan(draft: str) -> Scored:
    """The plan of a draft. Raises ValueError for one that the text alone cannot score."""
    plan = plan_named(draft)
    if not isinstance(plan, DrawnPlan):
        return plan
    if plan.width == 1:  # a slot a node, kept or not by its depth alone: a chain
        return ChainPlan(min(plan.depth, plan.nodes))
    raise ValueError(
        f"draft is {draft!r}; which slots a drawn tree keeps depends on tokens drawn elsewhere in "
        "it, so the text alone does not tell its rounds: measure drawn trees by decoding, with "
        "outrider decode or bench, or score a chain, a tree or a static tree here"
    )
