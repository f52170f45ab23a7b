"""How draft trees grow, level by level: planners that see laws, and never a token that they judge.

A node's score is fixed before its token is chosen, from the laws at its ancestors alone, and no
child outscores its parent. `outrider.eval.certificate.law` certifies what follows from that.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from outrider.eval.trees.tree import Tree


class Planner:
    """Which slots of a tree to expand and to keep, by the product of q along the path.

    A slot is a place for a child: (parent, 0), (parent, 1) ... in the order in which tokens will
    fill it. Its score is its parent's times the slot's share of the parent's law, largest first:
    the order statistic, not the share of the token that will be drawn. `add_level` is all that a
    planner ever hears, so it cannot look at the token whose slot it keeps; rows that are not
    sorted, as the shares of drawn tokens are not, are refused.

    Ties keep the order of growth: shallower first, then the earlier sibling. Then the kept slots
    are connected, kept siblings are a prefix, and neither a slot's own token nor a later sibling's
    decides whether it is kept: no descendant comes before it. EAGLE-2 (Li et al. 2024, section 4)
    for the likeliest children; drawn children keep the target's law under recursive rejection.
    """

    def __init__(self) -> None:
        self.parents = [-1]
        self.frontier: list[int] = [0]
        """Nodes whose children come next."""
        self.parent_slots: list[int] = [0]
        """Row of the last level that each node of the frontier came from."""
        self._scores = [0.0]

    def __len__(self) -> int:
        return len(self.parents)

    def add_level(self, log_shares: Sequence[Sequence[float]], width: int) -> list[int]:
        """Hang slots under the frontier; the best `width` of them are the new frontier.

        Row i holds the log-shares of the slots under `frontier[i]`, largest first. Raises
        ValueError for a row that is not sorted.
        """
        start, row_of = len(self.parents), {node: row for row, node in enumerate(self.frontier)}
        for parent, row in zip(self.frontier, log_shares, strict=True):
            if any(later > earlier for earlier, later in itertools.pairwise(row)):
                raise ValueError(
                    f"log_shares of node {parent} are {list(row)}, not sorted; give the largest "
                    "shares of its law in order: what was drawn must not be known here"
                )
            self.parents += [parent] * len(row)
            self._scores += [self._scores[parent] + min(share, 0.0) for share in row]
        self.frontier = self._best(range(start, len(self.parents)), width)
        self.parent_slots = [row_of[self.parents[node]] for node in self.frontier]
        return self.frontier

    def kept(self, num_drafts: int) -> list[int]:
        """The root and the `num_drafts` best nodes, in order of growth."""
        return [0, *self._best(range(1, len(self.parents)), num_drafts)]

    def _best(self, nodes: range, count: int) -> list[int]:
        return sorted(sorted(nodes, key=lambda node: -self._scores[node])[:count])


class Growth(Protocol):
    """A tree of likeliest tokens in the making."""

    @property
    def tokens(self) -> list[int]:
        """Each node's token, the root's first."""
        ...

    @property
    def parents(self) -> list[int]:
        """Each node's parent."""
        ...

    @property
    def frontier(self) -> list[int]:
        """Nodes whose children come next."""
        ...

    @property
    def parent_slots(self) -> list[int]:
        """Row of the last level that each node of the frontier came from."""
        ...

    def add_level(
        self, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], width: int
    ) -> list[int]:
        """Hang children under the frontier's nodes; returns the new frontier.

        Row i holds the children of `frontier[i]`, likeliest first.
        """
        ...

    def kept(self, num_drafts: int) -> list[int]:
        """The nodes of the finished tree, in its order."""
        ...

    def select(self, num_drafts: int) -> Tree:
        """The finished tree."""
        ...


class _Planned:
    """A tree whose shape a planner decides."""

    def __init__(self) -> None:
        self._planner = Planner()

    @property
    def parents(self) -> list[int]:
        """Each node's parent."""
        return self._planner.parents

    @property
    def frontier(self) -> list[int]:
        """Nodes whose children come next."""
        return self._planner.frontier

    @property
    def parent_slots(self) -> list[int]:
        """Row of the last level that each node of the frontier came from."""
        return self._planner.parent_slots


class DynamicGrowth(_Planned):
    """An EAGLE-2 tree: the planner's slots, filled with the likeliest tokens in order."""

    def __init__(self, root: int) -> None:
        super().__init__()
        self._tokens = [root]

    @property
    def tokens(self) -> list[int]:
        """Each node's token, the root's first."""
        return self._tokens

    def add_level(
        self, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], width: int
    ) -> list[int]:
        """See `Growth`."""
        for row in tokens:
            self._tokens += row
        return self._planner.add_level(log_probs, width)

    def kept(self, num_drafts: int) -> list[int]:
        """See `Growth`."""
        return self._planner.kept(num_drafts)

    def select(self, num_drafts: int) -> Tree:
        """The tree of the `num_drafts` best nodes under the root."""
        return subtree(self.tokens, self.parents, self.kept(num_drafts))


class StaticGrowth:
    """A tree whose shape was fixed beforehand: child r of a node is its r-th likeliest token."""

    def __init__(self, root: int, paths: Sequence[tuple[int, ...]]) -> None:
        self.tokens, self.parents = [root], [-1]
        self.frontier: list[int] = [0]
        self.parent_slots: list[int] = [0]
        self._ranks: list[tuple[int, ...]] = [()]
        self._children: dict[tuple[int, ...], list[int]] = {}
        for path in paths:
            self._children.setdefault(path[:-1], []).append(path[-1])

    def add_level(
        self,
        log_probs: Sequence[Sequence[float]],  # noqa: ARG002 (the shape is fixed)
        tokens: Sequence[Sequence[int]],
        width: int,  # noqa: ARG002
    ) -> list[int]:
        """Fill the children that the shape has; one ranked beyond the vocabulary is left out."""
        start = len(self.tokens)
        slots: list[int] = []
        for slot, (node, row) in enumerate(zip(self.frontier, tokens, strict=True)):
            for rank in sorted(self._children[self._ranks[node]]):
                if rank < len(row):
                    self.tokens.append(row[rank])
                    self.parents.append(node)
                    self._ranks.append((*self._ranks[node], rank))
                    slots.append(slot)
        grown = range(start, len(self.tokens))
        self.frontier = [node for node in grown if self._ranks[node] in self._children]
        self.parent_slots = [slots[node - start] for node in self.frontier]
        return self.frontier

    def kept(self, num_drafts: int) -> list[int]:  # noqa: ARG002
        """See `Growth`."""
        return list(range(len(self.tokens)))

    def select(self, num_drafts: int) -> Tree:  # noqa: ARG002
        """The tree as far as it has grown."""
        return Tree(tuple(self.tokens), tuple(self.parents))


def subtree(
    tokens: Sequence[int] | Mapping[int, int], parents: Sequence[int], kept: Sequence[int]
) -> Tree:
    """The tree of these nodes, the root first and parents before their children."""
    number = {old: new for new, old in enumerate(kept)}
    found = (-1, *(number[parents[node]] for node in kept[1:]))
    return Tree(tuple(tokens[node] for node in kept), found)


class DrawnGrowth(_Planned):
    """A tree of tokens drawn without replacement, each slot planned before it is filled.

    Slots that are neither expanded nor kept are never drawn: nothing depends on them.
    """

    def __init__(
        self,
        root: int,
        draw: Callable[[Any, int, int], int],
        name: Callable[[int], int] = lambda index: index,
    ) -> None:
        """Begin at a root.

        Args:
            root: The newest token.
            draw: From a law (not normalised), the depth of the parent and a number that tells
                slots apart, the index that fills the slot.
            name: The token of an index.
        """
        super().__init__()
        self._draw, self._name = draw, name
        self.tokens: dict[int, int] = {0: root}
        """Tokens of the slots filled so far."""
        self._laws: dict[int, Any] = {}
        self._urns: dict[int, Any] = {}
        self._depths = [0]

    def add_level(
        self, laws: Sequence[Any], log_shares: Sequence[Sequence[float]], width: int
    ) -> None:
        """Plan slots under the frontier, then fill those of the new frontier.

        `laws[i]` is the law of the next token after `frontier[i]`, `log_shares[i]` the logarithms
        of its largest entries in order, one for each slot, none of share zero.
        """
        self._urns |= dict(zip(self.frontier, laws, strict=True))
        self._planner.add_level(log_shares, width)
        for parent in self._planner.parents[len(self._depths) :]:
            self._depths.append(self._depths[parent] + 1)
        self._fill(self.frontier)

    def select(self, num_drafts: int) -> tuple[Tree, list[Any]]:
        """The tree of the best slots, and the law that each node's token was drawn from."""
        kept = self._planner.kept(num_drafts)
        self._fill(kept)
        tree = subtree(self.tokens, self._planner.parents, kept)
        return tree, [self._laws.get(node) for node in kept]

    def _fill(self, nodes: Sequence[int]) -> None:
        # Those asked for are a prefix of each parent's slots, so this is the order of draws.
        for node in nodes:
            if node in self.tokens:
                continue
            parent = self._planner.parents[node]
            left = self._urns[parent]
            index = self._draw(left, self._depths[parent], node)
            self.tokens[node] = self._name(index)
            self._laws[node] = left / left.sum()
            self._urns[parent] = left + 0  # a copy, whatever the array type
            self._urns[parent][index] = 0
