"""Rules that judge whole paths, from the leaves up: block and traversal verification, R9 and R10.

They accept a prefix for what follows it too, so a chain never yields fewer tokens than under
rejection; p is asked for at more nodes.
"""

from typing import Any

from outrider.eval.rules.verdict import Laws, Randomness, Site, Verdict, Weights, positive
from outrider.eval.rules.walk import check_chain
from outrider.eval.trees.tree import Tree


def block(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R9, block verification of a drawn chain (Sun et al. 2024): traversal without branches.

    With r_0 = 1, r_i = min(1, r_{i-1} p(x_i)/q(x_i)) and S_i = sum [r_i p - q]+ at the next place,
    the longest prefix i that passes a coin of S_i/(S_i + 1 - r_i), at the end r_i, stands; the next
    token is drawn from [r_i p - q]+, at the end from p. Raises ValueError for a tree with branches,
    and for a token that its q cannot produce.
    """
    check_chain(tree, "block")
    return traversal(tree, laws, random)


def traversal(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R10, traversal verification of a drawn tree (Weng et al. 2025), leaf to root.

    A node reached with weight r gives its child x the weight min(1, r p(x)/D(x)), D being the law
    x was drawn from given the siblings before it. If the child's subtree refuses, w = [r p - D]+
    with sum S makes r = S/(S + 1 - r) and p = norm(w). After its children the node itself stands
    with probability r, and the next token is drawn from its p as it then is. Exact for children
    drawn alike or without replacement. Raises ValueError for a token that its law cannot produce,
    and for one that was not drawn.
    """
    verdict = Traversal(tree, laws, random).visit(0, 1, 0)
    assert verdict is not None, "the root has weight one and always stands"
    return verdict


class Traversal:
    """One walk of rule R10."""

    def __init__(self, tree: Tree, laws: Laws, random: Randomness) -> None:
        self._tree, self._laws, self._random = tree, laws, random
        self._num_degenerate = 0

    def visit(self, node: int, reach: Any, depth: int) -> Verdict | None:  # noqa: ANN401 (a number)
        """The verdict when this node or one below it stands; `reach` is r, above zero."""
        site = Site(self._tree, self._laws, self._random, node, depth)
        p, is_reduced = site.target(), False
        for child in site.children:
            law, token = site.drawn(child), self._tree.tokens[child]
            if law is None:
                raise ValueError(
                    f"drafted token {token} was chosen, not drawn; the block and traversal rules "
                    "judge drawn drafts, for others use match or point_mass"
                )
            below = min(1, reach * p[token] / law[token])
            verdict = self.visit(child, below, depth + 1) if below > 0 else None
            if verdict is not None:
                return verdict
            is_reduced = True
            left = self.refuse(reach, p, law)
            if left is not None:
                reach, p = left
            elif node:
                return None
            else:  # the root always stands, so this is rounding
                self._num_degenerate += 1
        if node and not self._random.coin(depth - 1, node, reach):
            return None
        draw = self._random.draw_rest if is_reduced else self._random.draw
        return Verdict(
            path=self._tree.path(node),
            token=draw(depth, p),
            num_degenerate=self._num_degenerate,
        )

    def refuse(self, reach: Any, p: Weights, law: Weights) -> tuple[Any, Weights] | None:  # noqa: ANN401
        """The node's weight and law once a child drawn from `law` is refused; None without any."""
        rest = positive(reach * p - law)
        mass = rest.sum()
        return (mass / (mass + 1 - reach), rest / mass) if mass > 0 else None
