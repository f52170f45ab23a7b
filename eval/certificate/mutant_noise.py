"""Planted faults in the independence of noise: one uniform for what needs two.

vLLM #47386: draft draw, acceptance coin and recovery draw were keyed alike. One uniform in [0, 1)
is here one exact branch over the pieces on which everything made of it is constant.
"""

from fractions import Fraction
from itertools import pairwise
from typing import Any

from outrider.eval.certificate.law import Branching, Language, Round, Text
from outrider.eval.rules.verdict import Weights, positive


def shared_draft_and_coin(language: Language) -> Round:
    """The uniform that drew the draft from q also decides whether it is accepted."""

    def run(text: Text, random: Branching) -> Text:
        p, q = language.target(text), language.draft(text)
        edges = {*_edges(q), *(_ratio(p, q, t) for t in range(len(q)) if q[t] > 0)}
        u = _uniform(sorted(edges), random)
        draft = _inverse(q, u)
        if u < _ratio(p, q, draft):
            return (draft,)
        return (random.draw_rest(0, positive(p - q) if positive(p - q).sum() else p),)

    return run


def shared_draft_and_residual(language: Language) -> Round:
    """The uniform that drew the draft from q also draws the token after a refusal."""

    def run(text: Text, random: Branching) -> Text:
        p, q = language.target(text), language.draft(text)
        rest = positive(p - q)
        rest = rest / rest.sum() if rest.sum() else p
        u = _uniform(sorted({*_edges(q), *_edges(rest)}), random)
        draft = _inverse(q, u)
        if random.coin(0, 0, _ratio(p, q, draft)):
            return (draft,)
        return (_inverse(rest, u),)

    return run


def shared_coin_and_residual(language: Language) -> Round:
    """The coin that refused the draft also draws the token that replaces it."""

    def run(text: Text, random: Branching) -> Text:
        p, q = language.target(text), language.draft(text)
        draft = random.draw(0, q)
        rest = positive(p - q)
        rest = rest / rest.sum() if rest.sum() else p
        u = _uniform(sorted({*_edges(rest), _ratio(p, q, draft)}), random)
        return (draft,) if u < _ratio(p, q, draft) else (_inverse(rest, u),)

    return run


def _ratio(p: Weights, q: Weights, token: int) -> Any:  # noqa: ANN401 (a number)
    return min(Fraction(1), p[token] / q[token])


def _edges(law: Weights) -> list[Fraction]:
    total, found = Fraction(0), [Fraction(0)]
    for share in law:
        total += share
        found.append(total)
    return found


def _uniform(edges: list[Fraction], random: Branching) -> Fraction:
    """The start of a piece between two edges, with the piece's length as its chance."""
    pieces = [(low, high) for low, high in pairwise(edges) if high > low]
    return pieces[random.pick(0, [high - low for low, high in pieces])][0]


def _inverse(law: Weights, u: Fraction) -> int:
    total = Fraction(0)
    for token, share in enumerate(law):
        total += share
        if u < total:
            return token
    raise AssertionError("the uniform is below one, and laws sum to one")
