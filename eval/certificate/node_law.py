"""The exact law of one node under a production rule, on real arrays at vocabulary size.

Coins and drafts become branches; the last draw of a branch is not made but its whole law added up,
so a vocabulary of 100,000 costs one vector operation a branch. Dimensions: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.eval.certificate.children import children
from outrider.eval.certificate.law import Branching, outcomes
from outrider.eval.rules.verdict import Siblings, Verify, Weights
from outrider.eval.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class NodeLaw:
    """What is emitted at a node with drafted children."""

    accepted_V: np.ndarray
    """Chance that a child is accepted and is this token."""
    rest_V: np.ndarray
    """Chance that none is accepted and this token is emitted."""

    @property
    def total_V(self) -> np.ndarray:  # noqa: N802 (dimension suffix)
        """The law of the next token; p for an exact rule."""
        return self.accepted_V + self.rest_V


def node_law(verify: Verify, siblings: Siblings, p_V: Weights, q_V: Weights, count: int) -> NodeLaw:
    """Run a rule on `count` children drafted from q, in every way; p_V, q_V: numpy or torch."""
    accepted_V, rest_V = np.zeros(len(p_V)), np.zeros(len(p_V))
    for weight, (token, is_accepted, left) in outcomes(
        lambda random: _run(random, verify, siblings, (p_V, q_V), count)
    ):
        if left is None:
            (accepted_V if is_accepted else rest_V)[token] += float(weight)
        else:
            rest_V += float(weight) * left
    return NodeLaw(accepted_V=accepted_V, rest_V=rest_V)


def _run(
    branching: Branching,
    verify: Verify,
    siblings: Siblings,
    laws: tuple[Weights, Weights],
    count: int,
) -> tuple[int, bool, np.ndarray | None]:
    p_V, q_V = laws
    drafts = list(children(q_V, count, siblings, lambda _, law: _support_draw(branching, law)))
    tokens = [child.token for child in drafts]
    tree = Tree((0, *tokens), (-1, *[0] * len(tokens)))
    chosen = [child.token for child in drafts if child.law is None]
    random = _Summing(branching, chosen)
    verdict = verify(tree, _OneNode(p_V, [None, *(child.law for child in drafts)]), random)
    if verdict.path:
        return tokens[verdict.path[0] - 1], True, None
    return verdict.token, False, random.left


def _support_draw(branching: Branching, law: Weights) -> int:
    numbers = np.asarray(law)
    support = np.flatnonzero(numbers)
    return int(support[branching.pick(0, list(numbers[support]))])


class _OneNode:
    """Laws of the root; its children lead nowhere of interest."""

    def __init__(self, p_V: Weights, laws: Sequence[Weights | None]) -> None:
        self._p_V, self._laws = p_V, laws

    def target(self, node: int) -> Weights:  # noqa: ARG002 (below the root any law will do)
        return self._p_V

    def draft(self, node: int) -> Weights | None:
        return self._laws[node]


class _Summing:
    """Branches on coins, and on a draw only between chosen children and all the rest."""

    def __init__(self, branching: Branching, chosen: Sequence[int]) -> None:
        self._branching, self._chosen = branching, chosen
        self.coin, self.pick = branching.coin, branching.pick
        self.left: np.ndarray | None = None

    def draw(self, depth: int, weights: Any) -> int:  # noqa: ANN401
        if depth:
            return 0  # below an accepted child
        left = np.asarray(weights, dtype=np.float64).copy()
        left /= left.sum()
        shares = [left[token] for token in self._chosen]
        left[list(self._chosen)] = 0
        outcome = self._branching.pick(0, [*shares, left.sum()])
        if outcome < len(shares):
            return self._chosen[outcome]
        self.left = left / left.sum()
        return -1

    draw_rest = draw
