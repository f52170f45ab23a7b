"""How the certificate drafts: trees of any shape over a small language, drawn when looked at.

A draft's token is drawn when a rule first asks for it. Drafts are independent of all coins, so no
law changes, and the branches of drafts that no rule ever looks at need not be enumerated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from outrider.eval.certificate.children import Child, children, num_children
from outrider.eval.certificate.law import Branching, Language, Proposal, Propose, Text
from outrider.eval.rules.verdict import Siblings, Weights


class Place(NamedTuple):
    """A node about to get children, and all that a planner may know of it: itself and the past."""

    ranks: tuple[int, ...]
    """Which child each node on the path was; empty at the root."""
    chances: tuple[Any, ...]
    """The drawn probability q of each token on the path, as it was drawn."""
    law: Weights
    """q after the path."""


Width: TypeAlias = Callable[[Place], int]
"""How many children a node gets."""


def fixed(*widths: int) -> Width:
    """So many children at each depth: (2, 1) is two children with one child each."""
    return lambda place: widths[len(place.ranks)] if len(place.ranks) < len(widths) else 0


def propose_chain(language: Language, length: int) -> Propose:
    """Draft a chain, every token drawn from q."""
    return propose_tree(language, fixed(*[1] * length), Siblings.SINGLE)


def uneven(counts: Mapping[tuple[int, ...], int]) -> Width:
    """So many children at the node with these ranks on its path; elsewhere none."""
    return lambda place: counts.get(place.ranks, 0)


def stops_after(width: Width, threshold: Any) -> Width:  # noqa: ANN401 (any number)
    """Draft no further below a token whose q was under the threshold; the token itself is kept."""
    return lambda place: 0 if any(chance < threshold for chance in place.chances) else width(place)


def stops_before(width: Width, threshold: Any) -> Width:  # noqa: ANN401
    """Draft no further where q's highest probability is under the threshold."""
    return lambda place: 0 if place.law.max() < threshold else width(place)


def propose_tree(language: Language, width: Width, siblings: Siblings) -> Propose:
    """Draft a tree of this shape, its siblings chosen or drawn as asked."""

    def propose(text: Text, random: Branching) -> Proposal:
        tree = LazyTree(language, text, random, width, siblings)
        return Proposal(tree=tree, laws=tree.laws)

    return propose


@dataclass
class _Node:
    """A node of a lazy tree; its token is drawn with those of the siblings before it."""

    parent: int
    rank: int
    token: int | None = None
    law: Weights | None = None
    chance: Any = None
    siblings: Iterator[Child] | None = None
    family: tuple[int, ...] = ()
    children: tuple[int, ...] | None = None


class LazyTree:
    """Reads like a `Tree`; nodes appear, and their tokens are drawn, when they are asked for."""

    def __init__(
        self,
        language: Language,
        text: Text,
        random: Branching,
        width: Width,
        siblings: Siblings,
    ) -> None:
        self._language, self._text, self._random = language, text, random
        self._width, self._siblings = width, siblings
        self._nodes = [_Node(-1, 0, token=0)]
        self.children = _Reader(self._children)
        self.tokens = _Reader(self._token)
        self.laws = _Reader(self._law)
        self.depths = _Reader(lambda node: len(self.path(node)))
        self.parents = _Reader(lambda node: self._nodes[node].parent)

    def __len__(self) -> int:
        """Nodes of the whole tree, all of them drawn now."""
        node = 0
        while node < len(self._nodes):
            self._token(node)
            self._children(node)
            node += 1
        return node

    @property
    def is_chain(self) -> bool:
        """Whether it was drafted as a chain; looking it up in the nodes would draw them all."""
        return self._siblings is Siblings.SINGLE

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to this one; empty for the root."""
        found: list[int] = []
        while node > 0:
            found.append(node)
            node = self._nodes[node].parent
        return tuple(reversed(found))

    def _children(self, node: int) -> tuple[int, ...]:
        entry = self._nodes[node]
        if entry.children is None:
            path = self.path(node)
            law = self._language.draft(self._text + tuple(map(self._token, path)))
            chances = tuple(self._nodes[n].chance for n in path)
            ranks = tuple(self._nodes[n].rank for n in path)
            count = self._width(Place(ranks, chances, law))
            drafts = children(law, count, self._siblings, lambda _, q: self._random.draw(0, q))
            assert count < 2 or not self.is_chain, "a chain has one child a node"
            first = len(self._nodes)
            family = tuple(range(first, first + num_children(law, count, self._siblings)))
            for rank in range(len(family)):
                self._nodes.append(_Node(node, rank, siblings=drafts, family=family))
            entry.children = family
        return entry.children

    def _token(self, node: int) -> int:
        entry = self._nodes[node]
        if entry.token is None:
            assert entry.siblings is not None
            for sibling in entry.family[: entry.rank + 1]:
                other = self._nodes[sibling]
                if other.token is None:
                    other.token, other.law = next(entry.siblings)
                    other.chance = 1 if other.law is None else other.law[other.token]
        assert entry.token is not None
        return entry.token

    def _law(self, node: int) -> Weights | None:
        self._token(node)
        return self._nodes[node].law


class _Reader:
    """Square brackets over a function of a node."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read

    def __getitem__(self, node: int) -> Any:  # noqa: ANN401 (what the function returns)
        return self._read(node)


def eager(propose: Propose) -> Propose:
    """The same drafts, all of them drawn before the rule looks at any."""

    def run(text: Text, random: Branching) -> Proposal:
        proposal = propose(text, random)
        len(proposal.tree)
        return proposal

    return run
