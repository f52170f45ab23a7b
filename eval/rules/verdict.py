"""What a verification rule sees, asks and answers; how the children that it judges were drafted.

Rules are blind to the array type: weights are numpy or torch vectors of floats, or of Fractions.
p: the target's law at a node; q: the law from which a node's token was drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

from outrider.eval.trees.tree import Tree

Weights: TypeAlias = Any
"""A vector over the vocabulary: numpy or torch, floats or Fractions; laws sum to one."""


class Randomness(Protocol):
    """Independent noise. `depth` is that of the node after which a token is decided, root 0."""

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401 (any number)
        """True with this probability: always at 1, never at 0; `slot` numbers a depth's coins."""
        ...

    def pick(self, depth: int, shares: Sequence[Any]) -> int:
        """Which of several outcomes one coin falls on; shares are in [0, 1] and sum to one."""
        ...

    def draw(self, depth: int, weights: Weights) -> int:
        """A token from the target's law: the noise that plain decoding would use here."""
        ...

    def draw_rest(self, depth: int, weights: Weights) -> int:
        """A token from what a rejection left, not normalised; other noise than `draw`'s."""
        ...


class Laws(Protocol):
    """The laws at a tree's nodes, computed when asked for: a walk visits few of them."""

    def target(self, node: int) -> Weights:
        """The law p after this node's path."""
        ...

    def draft(self, node: int) -> Weights | None:
        """The law this node's token was drawn from, given the siblings drawn before it.

        None for a token that was chosen without noise.
        """
        ...


class Siblings(StrEnum):
    """How the children of one node came about."""

    NONE = "none"
    """There are none: plain decoding."""
    CHOSEN = "chosen"
    """Without noise, such as the likeliest tokens of q."""
    SINGLE = "single"
    """One child a node, drawn from q: a chain."""
    IID = "iid"
    """Drawn from q independently, in node order."""
    WITHOUT = "without"
    """Drawn from q without replacement, in node order."""
    HYBRID = "hybrid"
    """The likeliest tokens of q and one drawn from the rest of q."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a round emits: the accepted nodes' tokens, then `token`."""

    path: tuple[int, ...]
    token: int
    num_degenerate: int = 0
    """Rejections that left nothing to draw from (rounding: p and q equal), settled by p."""


Verify: TypeAlias = Callable[[Tree, Laws, Randomness], Verdict]
"""A rule: a drafted tree, the laws at its nodes and noise to what is emitted."""


class Step(NamedTuple):
    """How a node was settled: on to `child`, or by emitting `token`."""

    child: int | None
    token: int = -1
    num_degenerate: int = 0


@dataclass(frozen=True)
class Site:
    """A node that a walk has come to."""

    tree: Tree
    laws: Laws
    random: Randomness
    node: int
    depth: int

    @property
    def children(self) -> tuple[int, ...]:
        """The node's children in draw order."""
        return self.tree.children[self.node]

    def target(self) -> Weights:
        """The law p after the node."""
        return self.laws.target(self.node)

    def drawn(self, child: int) -> Weights | None:
        """The law of a child's token. Raises ValueError where that law cannot produce it."""
        law, token = self.laws.draft(child), self.tree.tokens[child]
        if law is not None and law[token] == 0:
            raise ValueError(
                f"drafted token {token} has probability 0 under its own draft law; give the law "
                "it was drawn from"
            )
        return law

    def follow(self, token: int, children: Sequence[int], num_degenerate: int = 0) -> Step:
        """Go on to the first of these children with the token, or emit it."""
        hits = (child for child in children if self.tree.tokens[child] == token)
        return Step(next(hits, None), token, num_degenerate)


def walk(tree: Tree, laws: Laws, random: Randomness, settle: Callable[[Site], Step]) -> Verdict:
    """Settle one node after another, from the root down, until one emits a token.

    Exact when `settle` emits p at every node, whatever was decided before (the node condition).
    """
    path: list[int] = []
    num_degenerate = 0
    while True:
        step = settle(Site(tree, laws, random, path[-1] if path else 0, len(path)))
        num_degenerate += step.num_degenerate
        if step.child is None:
            return Verdict(path=tuple(path), token=step.token, num_degenerate=num_degenerate)
        path.append(step.child)


def positive(weights: Weights) -> Weights:
    """[w]+, elementwise."""
    return weights.clip(min=0)


def lesser(one: Weights, other: Weights) -> Weights:
    """The elementwise minimum."""
    return one.clip(max=other)
