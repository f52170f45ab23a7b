"""The weights of traversal verification, R10, on trees: a depth at a time, few rows at once.

Dimensions: B rounds, N nodes, V vocabulary, K children of a node, X nodes of one depth, of all
rounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.eval.batched import rows
from outrider.eval.batched.drafts import Drafts
from outrider.eval.batched.residuals import (
    Family,
    Nodes,
    family_of,
    reduced_factor,
)


class Weights(NamedTuple):
    """By node: the weight at which the walk reaches it, and that with which it stands."""

    reached_BN: Tensor
    """Zero where the walk never comes."""
    stands_BN: Tensor
    """Once all its children have been refused; zero where it is then refused without a coin."""
    num_degenerate_BK: Tensor
    """By child of the root: refusals that left nothing."""


class Refused(NamedTuple):
    """What is left of nodes when all their children have been refused."""

    below_XK: Tensor
    """The weight at which each child was reached."""
    stands_X: Tensor
    factor_X: Tensor
    """Of what is left of p."""
    num_degenerate_XK: Tensor


def tree_weights(drafts: Drafts, nodes: Nodes) -> Weights:
    """The weights of all nodes of trees."""
    num_rounds, num_nodes = drafts.tokens_BN.shape
    shapes, step = drafts.shapes, rows.rows_at_once(drafts.p_BNV)
    # One column more, for nodes that are not there.
    size, num_degenerate_BK = num_nodes + 1, None
    reached_Y = torch.zeros_like(nodes.p_BN[:, 0]).repeat_interleave(size)
    reached_Y = reached_Y.index_fill(0, drafts.rounds_B * size, 1.0)
    stands_Y = torch.zeros_like(reached_Y)
    for depth, group in enumerate(shapes.groups):
        for first in range(0, group[0], step):
            counts = [min(count - first, step) for count in group if count > first]
            node_BM = shapes.levels_BDM[:, depth, first : first + counts[0]]
            node_X = node_BM.T.flatten()  # a node of every round, then the next
            round_X = drafts.rounds_B.repeat(counts[0])
            place_X = round_X * size
            one = family_of(drafts, nodes, round_X, node_X.clamp(min=0), len(counts))
            laws = [_laws_of(drafts, one, depth, first, place) for place in range(counts[0])]
            after = refuse_all(
                one, reached_Y[place_X + one.node_X], [laws[:count] for count in counts]
            )
            if num_degenerate_BK is None:
                num_degenerate_BK = after.num_degenerate_XK
            # Nodes that are not there were looked up as the root, and must not write.
            is_kid_XK = one.kin.is_there_XK & (node_X >= 0)[:, None]
            kids_XK = torch.where(is_kid_XK, one.kin.nodes_XK, num_nodes)
            kids_XK = kids_XK + place_X[:, None]
            reached_Y = reached_Y.scatter(0, kids_XK.flatten(), after.below_XK.flatten())
            inner_X = torch.where(is_kid_XK[:, 0], node_X, num_nodes) + place_X
            stands_Y = stands_Y.scatter(0, inner_X, after.stands_X)
    reached_BN = reached_Y.view(num_rounds, size)[:, :-1]
    stands_BN = stands_Y.view(num_rounds, size)[:, :-1]
    assert num_degenerate_BK is not None, "a tree has a second node"
    has_child_BN = shapes.children_BNK[..., 0] >= 0
    return Weights(reached_BN, torch.where(has_child_BN, stands_BN, reached_BN), num_degenerate_BK)


def refuse_all(
    one: Family, reached_X: Tensor, laws: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> Refused:
    """Refuse the children of nodes that were reached at these weights, in turn.

    `laws` are, for each slot, p and q of the nodes that have such a child; these come first.
    """
    is_alive_X, is_root_X = reached_X > 0, one.node_X == 0
    weight_X, mass_X = torch.where(is_alive_X, reached_X, 1.0), torch.ones_like(reached_X)
    factor_X = torch.zeros_like(reached_X)
    below: list[Tensor] = []
    degenerate: list[Tensor] = []
    work_BV = torch.empty_like(laws[0][0][0])
    columns = (one.p_XK, one.q_XK, one.left_XK, one.kin.is_there_XK)
    for slot, (p_X, q_X, left_X, is_child_X) in enumerate(
        zip(*(column.unbind(1) for column in columns), strict=True)
    ):
        is_there_X = is_alive_X & is_child_X
        share_X = (p_X - factor_X * q_X).relu()
        below.append(reach(weight_X, share_X, mass_X, q_X, left_X) * is_there_X)
        new_factor_X = reduced_factor(factor_X, mass_X, weight_X * left_X)
        new_mass_X = masses(laws[slot], new_factor_X, work_BV)
        is_less_X = is_there_X & (new_mass_X > 0)
        degenerate.append(is_there_X ^ is_less_X)
        after_X = weight_after(weight_X * new_mass_X / mass_X, weight_X)
        weight_X = torch.where(is_less_X, after_X, weight_X)
        mass_X = torch.where(is_less_X, new_mass_X, mass_X)
        factor_X = torch.where(is_less_X, new_factor_X, factor_X)
        # The root always stands, so there it is rounding.
        is_alive_X = is_alive_X & (is_root_X | ~degenerate[-1])
    return Refused(
        below_XK=torch.stack(below, 1),
        stands_X=weight_X * is_alive_X,
        factor_X=factor_X,
        num_degenerate_XK=torch.stack(degenerate, 1).long(),
    )


def _laws_of(
    drafts: Drafts, one: Family, depth: int, first: int, place: int
) -> tuple[Tensor, Tensor]:
    """The laws p and q at the nodes of this place, [B, V]; not copied where all have this one."""
    assert drafts.q_BRV is not None
    alike = drafts.shapes.alike
    if alike is not None and drafts.rows_BN is None:
        node = alike[depth][first + place]
        return drafts.p_BNV[:, node], drafts.q_BRV[:, node]
    these = slice(place * len(drafts.p_BNV), (place + 1) * len(drafts.p_BNV))
    p_BV = rows.rows_at(drafts.p_BNV, one.round_X[these], one.node_X[these])
    return p_BV, rows.rows_at(drafts.q_BRV, one.round_X[these], one.row_X[these])


def masses(laws: Sequence[tuple[Tensor, Tensor]], factor_X: Tensor, work_BV: Tensor) -> Tensor:
    """The sum of [p - c q]+ for the nodes of `laws`, a few after the others; zero for the rest."""
    size = len(laws[0][0])
    parts = [
        rows.mass(rows.excess(p_BV, q_BV, factor_X[number * size : (number + 1) * size], work_BV))
        for number, (p_BV, q_BV) in enumerate(laws)
    ]
    return torch.cat([*parts, torch.zeros_like(factor_X[len(laws) * size :])])


def reach(weight: Tensor, share: Tensor, mass: Tensor, q: Tensor, left: Tensor) -> Tensor:
    """min(1, r R(x)/D(x)), R = share/mass and D = q/left; a defect's is 0."""
    return (weight * share * left / (mass * q).clamp(min=1e-300)).clamp(max=1.0) * (q > 0)


def weight_after(sums: Tensor, weights: Tensor) -> Tensor:
    """S/(S + 1 - r), zero where S is."""
    return torch.where(sums > 0, sums / (sums + 1 - weights).clamp(min=1e-300), 0.0)
