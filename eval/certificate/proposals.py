"""Draft plans on the certificate's small languages, grown by the production planners."""

import math

from outrider.eval.certificate.law import Branching, Language, Proposal, Propose, Text
from outrider.eval.trees.growth import DrawnGrowth, Growth
from outrider.eval.trees.plans import DrawnPlan, LikeliestPlan
from outrider.eval.trees.tree import Tree


def propose_grown(language: Language, plan: LikeliestPlan) -> Propose:
    """A tree of likeliest tokens, dynamic or static, without noise."""

    def propose(text: Text, random: Branching) -> Proposal:  # noqa: ARG001
        growth = plan.start(0)
        for _ in range(plan.depth):
            rows = [_likeliest(language, (*text, *_path(growth, n))) for n in growth.frontier]
            rows = [row[: plan.width] for row in rows]
            shares = [[_log(share) for _, share in row] for row in rows]
            growth.add_level(shares, [[token for token, _ in row] for row in rows], plan.width)
        return Proposal(tree=growth.select(plan.nodes))

    return propose


def propose_drawn(language: Language, plan: DrawnPlan) -> Propose:
    """A drawn tree, its slots planned by order statistics."""

    def propose(text: Text, random: Branching) -> Proposal:
        growth = DrawnGrowth(0, lambda left, depth, slot: random.draw(depth, left))  # noqa: ARG005
        parents = growth.parents
        for _ in range(plan.depth):
            paths = [_tokens_to(growth.tokens, parents, node) for node in growth.frontier]
            laws = [language.draft((*text, *path)) for path in paths]
            rows = [sorted((float(x) for x in law if x > 0), reverse=True) for law in laws]
            growth.add_level(
                laws, [[_log(x) for x in row[: plan.width]] for row in rows], plan.width
            )
        tree, drawn = growth.select(plan.nodes)
        return Proposal(tree=tree, laws=tuple(drawn))

    return propose


def _likeliest(language: Language, text: Text) -> list[tuple[int, float]]:
    """Tokens and shares, the likeliest first, the lowest id among equals."""
    law = language.draft(text)
    return sorted(((t, float(x)) for t, x in enumerate(law)), key=lambda pair: -pair[1])


def _path(growth: Growth, node: int) -> Text:
    return _tokens_to(dict(enumerate(growth.tokens)), growth.parents, node)


def _tokens_to(tokens: dict[int, int], parents: list[int], node: int) -> Text:
    tree = Tree(tuple(range(len(parents))), tuple(parents))
    return tuple(tokens[step] for step in tree.path(node))


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf
