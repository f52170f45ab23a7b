"""Drafting the children of one node: chosen or drawn, each with the law it was drawn from.

Written once for numpy and torch, floats and Fractions, so that certificates draft as decoding does.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from outrider.eval.rules.verdict import Siblings, Weights

DrawChild: TypeAlias = Callable[[int, Weights], int]
"""A slot's number and its law, not normalised, to a token; slots have independent noise."""


class Child(NamedTuple):
    """A drafted token and the law it was drawn from, None if it was chosen."""

    token: int
    law: Weights | None


def num_children(law: Weights, count: int, siblings: Siblings) -> int:
    """How many of `count` children there will be: drafts that differ are no more than q has tokens.

    A function of q alone; which tokens are drawn cannot change it.
    """
    if siblings in (Siblings.IID, Siblings.SINGLE):
        return count
    if siblings is Siblings.CHOSEN:
        return min(count, len(law))
    return min(count, int((law > 0).sum()))


def children(law: Weights, count: int, siblings: Siblings, draw: DrawChild) -> Iterator[Child]:
    """Draft up to `count` children from q one after the other, each when it is asked for.

    Hybrid children are q's `count - 1` likeliest and last one from the rest, if q has any. Equally
    likely tokens are taken lowest id first. Raises ValueError for siblings of kind none.
    """
    match siblings:
        case Siblings.IID | Siblings.SINGLE:
            yield from (Child(draw(slot, law), law) for slot in range(count))
        case Siblings.CHOSEN:
            yield from (Child(token, None) for token in _likeliest(law, count))
        case Siblings.WITHOUT:
            yield from _without(law, num_children(law, count, siblings), draw)
        case Siblings.HYBRID:
            top = _likeliest(law, min(count - 1, num_children(law, count, siblings)))
            yield from (Child(token, None) for token in top)
            rest = _outside(law, top)
            if rest.sum() > 0:
                rest = rest / rest.sum()
                yield Child(draw(len(top), rest), rest)
        case Siblings.NONE:
            raise ValueError("siblings are 'none'; draft chosen, single, iid, without or hybrid")


def _without(law: Weights, count: int, draw: DrawChild) -> Iterator[Child]:
    for slot in range(count):
        token = draw(slot, law)
        yield Child(token, law)
        law = _outside(law, [token])
        if slot + 1 < count:
            law = law / law.sum()


def _outside(law: Weights, tokens: list[int]) -> Any:  # noqa: ANN401 (weights)
    rest = law + 0  # a copy, whatever the array type
    for token in tokens:
        rest[token] = 0
    return rest


def _likeliest(law: Weights, count: int) -> list[int]:
    found: list[int] = []
    left = law + 1  # above zero, so that a taken token is never taken again
    for _ in range(min(count, len(law))):
        token = int((left == left.max()).nonzero()[0].reshape(-1)[0])
        found.append(token)
        left[token] = 0
    return found
