"""The weights of traversal verification, R10, on trees: a depth at a time, few rows at once.

Dimensions: B rounds, N nodes, V vocabulary, K children of a node, X nodes of one depth.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.eval import batched_rows as rows
from outrider.eval.batched_drafts import Drafts, Noise
from outrider.eval.batched_recursive import (
    Family,
    Rest,
    family_of,
    frozen_at,
    laws_at,
    nothing_refused,
    reduced_factor,
    rest_mass,
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
    rest: Rest
    num_degenerate_XK: Tensor


def tree_weights(drafts: Drafts, noise: Noise) -> Weights:
    """The weights of all nodes of trees."""
    num_rounds, num_nodes = drafts.tokens_BN.shape
    shapes, step = drafts.shapes, rows.rows_at_once(drafts.p_BNV)
    # One column more, for nodes that are not there.
    size = num_nodes + 1
    reached_Y = torch.zeros_like(noise.coins_BN[:, 0]).repeat_interleave(size)
    reached_Y = reached_Y.index_fill(0, drafts.rounds_B * size, 1.0)
    stands_Y, num_degenerate_BK = torch.zeros_like(reached_Y), None
    for depth, group in enumerate(shapes.groups):
        for first in range(0, group[0], step):
            node_BM = shapes.levels_BDM[:, depth, first : min(first + step, group[0])]
            node_X = node_BM.clamp(min=0).flatten()
            round_X = drafts.rounds_B.repeat_interleave(node_BM.shape[1])
            width = sum(count > first for count in group)
            one = family_of(drafts, noise, round_X, node_X, width)
            place_X = round_X * size
            refused = refuse_all(drafts, one, reached_Y[place_X + node_X], is_root=depth == 0)
            if num_degenerate_BK is None:
                num_degenerate_BK = refused.num_degenerate_XK
            kids_XK = torch.where(one.kin.is_there_XK, one.kin.nodes_XK, num_nodes)
            kids_XK = kids_XK + place_X[:, None]
            reached_Y = reached_Y.scatter(0, kids_XK.flatten(), refused.below_XK.flatten())
            # Nodes that are not there, or have no child, come with the root's number or a leaf's.
            is_inner_X = one.kin.is_there_XK[:, 0] & (node_BM.flatten() >= 0)
            inner_X = torch.where(is_inner_X, node_X, num_nodes) + place_X
            stands_Y = stands_Y.scatter(0, inner_X, refused.stands_X)
    reached_BN = reached_Y.view(num_rounds, size)[:, :-1]
    stands_BN = stands_Y.view(num_rounds, size)[:, :-1]
    assert num_degenerate_BK is not None, "a tree has a second node"
    has_child_BN = shapes.children_BNK[..., 0] >= 0
    return Weights(reached_BN, torch.where(has_child_BN, stands_BN, reached_BN), num_degenerate_BK)


def refuse_all(drafts: Drafts, one: Family, reached_X: Tensor, *, is_root: bool) -> Refused:
    """Refuse the children of nodes that were reached at these weights, in turn."""
    laws, rest = laws_at(drafts, one), nothing_refused(one)
    is_alive_X = reached_X > 0
    weight_X, mass_X = torch.where(is_alive_X, reached_X, 1.0), torch.ones_like(reached_X)
    below, degenerate = [], []
    for slot in range(one.q_XK.shape[1]):
        q_X, left_X = one.q_XK[:, slot], one.left_XK[:, slot]
        is_there_X = is_alive_X & one.kin.is_there_XK[:, slot]
        share_X = (one.p_XK[:, slot] - rest.factor_X * q_X).relu()
        below_X = reach(weight_X, share_X, mass_X, q_X, left_X)
        below.append(torch.where(is_there_X & (q_X > 0), below_X, 0.0))
        factor_X = reduced_factor(rest.factor_X, mass_X, weight_X * left_X)
        less_X = rest_mass(drafts, one, Rest(factor_X, rest.frozen_XK), *laws)
        is_less_X = is_there_X & (less_X > 0)
        after_X = weight_after(weight_X * less_X / mass_X, weight_X)
        degenerate.append(is_there_X & ~is_less_X)
        weight_X = torch.where(is_less_X, after_X, weight_X)
        mass_X = torch.where(is_less_X, less_X, mass_X)
        factor_X = torch.where(is_less_X, factor_X, rest.factor_X)
        rest = Rest(factor_X, frozen_at(drafts, rest.frozen_XK, factor_X, slot))
        if not is_root:  # the root always stands, so there it is rounding
            is_alive_X = is_alive_X & ~degenerate[-1]
    return Refused(
        below_XK=torch.stack(below, 1),
        stands_X=torch.where(is_alive_X, weight_X, 0.0),
        rest=rest,
        num_degenerate_XK=torch.stack(degenerate, 1).long(),
    )


def reach(weight: Tensor, share: Tensor, mass: Tensor, q: Tensor, left: Tensor) -> Tensor:
    """min(1, r R(x)/D(x)), R = share/mass and D = q/left."""
    return (weight * share * left / (mass * q)).clamp(max=1.0)


def weight_after(sums: Tensor, weights: Tensor) -> Tensor:
    """S/(S + 1 - r), zero where S is."""
    return torch.where(sums > 0, sums / (sums + 1 - weights).clamp(min=1e-300), 0.0)
