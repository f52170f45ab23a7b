"""Batched recursive rejection, R1, R4, R5 and R7: what a refusal leaves is [p - c q]+, a factor c.

With R = [p - c q]+ of mass m, and D the law of the next child, q without the elder siblings' tokens
over the mass l that is left of it, a refusal leaves [R/m - D]+, which is [p - (c + m/l) q]+ times a
number. That holds at the elder siblings' tokens, too: they were refused, so R was below D there and
nothing is left. A residual is one number, not a row.
Dimensions: B rounds, N nodes, V vocabulary, K children of a node, X any.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.eval.batched import rows
from outrider.eval.batched.drafts import Drafts, Noise, Verdicts
from outrider.eval.batched.walk import Kin, emitted, kin_of, last_coin, mass_outside, match, walk
from outrider.eval.rules.verdict import Siblings


class Nodes(NamedTuple):
    """What every drafted node is judged by, looked up at once."""

    coins_BN: Tensor
    p_BN: Tensor
    """The token's probability after the node's parent."""
    q_BN: Tensor
    """And under the row of q; zero where there is no such node."""
    is_impossible_B: Tensor
    """Whether a drawn token is one that its law cannot produce."""
    outside_BN: Tensor | None
    """The mass of q outside each node's children, where drawn tokens leave it."""


class Family(NamedTuple):
    """The children of one node each, and all that they are judged by."""

    round_X: Tensor
    node_X: Tensor
    row_X: Tensor
    """The row of q that they were drawn from."""
    kin: Kin
    coins_XK: Tensor
    p_XK: Tensor
    q_XK: Tensor
    left_XK: Tensor
    """The mass left of q when each child was drawn."""
    is_drawn_XK: Tensor


class Judged(NamedTuple):
    """What came of the children of one node each."""

    child_X: Tensor
    """The child that stands, or N."""
    factor_X: Tensor
    """Of what is left of p."""
    num_degenerate_X: Tensor


class Drawn(NamedTuple):
    """A token drawn from what was left, and whether that was nothing, so that p was drawn from."""

    token_X: Tensor
    is_empty_X: Tensor


def nodes_of(drafts: Drafts, noise: Noise) -> Nodes:
    """Look the numbers of all drafted nodes up."""
    assert drafts.q_BRV is not None
    parents_BN, round_B = drafts.shapes.parents_BN, drafts.rounds_B
    is_there_BN, up_BN = parents_BN >= 0, parents_BN.clamp(min=0)
    tokens_BN = torch.where(is_there_BN, drafts.tokens_BN, 0)
    row_BN = drafts.row_of(round_B[:, None], up_BN)
    q_BN = rows.shares_at(drafts.q_BRV, round_B, row_BN, tokens_BN) * is_there_BN
    is_drawn_BN = is_there_BN if drafts.is_drawn_BN is None else is_there_BN & drafts.is_drawn_BN
    is_bad_BN, outside_BN = is_drawn_BN & (q_BN <= 0), None
    if drafts.is_judged_without and not drafts.shapes.is_chain:
        kids_BNK = drafts.shapes.children_BNK
        kin_BNK = drafts.tokens_BN.gather(1, kids_BNK.clamp(min=0).flatten(1)).view_as(kids_BNK)
        is_bad_BN = is_bad_BN | rows.is_repeated(kin_BNK, kids_BNK >= 0).any(-1)
        ids_1N = torch.arange(parents_BN.shape[1], device=round_B.device)[None]
        all_BN = drafts.row_of(round_B[:, None], ids_1N).expand_as(parents_BN)
        outside_BN = mass_outside(drafts, drafts.q_BRV, all_BN)
    p_BN = rows.shares_at(drafts.p_BNV, round_B, up_BN, tokens_BN)
    return Nodes(noise.coins_BN[:, : p_BN.shape[1]], p_BN, q_BN, is_bad_BN.any(-1), outside_BN)


def family_of(drafts: Drafts, nodes: Nodes, round_X: Tensor, node_X: Tensor, width: int) -> Family:
    """The first `width` children of these nodes."""
    kin, row_X = kin_of(drafts, round_X, node_X, width), drafts.row_of(round_X, node_X)
    round_X1 = round_X[:, None]
    q_XK = nodes.q_BN[round_X1, kin.index_XK] * kin.is_there_XK
    left_XK = torch.ones_like(q_XK)
    if nodes.outside_BN is not None and width > 1:
        left_XK = left_masses(q_XK, nodes.outside_BN[round_X, node_X])
    is_drawn_XK = kin.is_there_XK
    if drafts.is_drawn_BN is not None:
        is_drawn_XK = is_drawn_XK & drafts.is_drawn_BN[round_X1, kin.index_XK]
    return Family(
        round_X=round_X,
        node_X=node_X,
        row_X=row_X,
        kin=kin,
        coins_XK=nodes.coins_BN[round_X1, kin.index_XK],
        p_XK=nodes.p_BN[round_X1, kin.index_XK] * kin.is_there_XK,
        q_XK=q_XK,
        left_XK=left_XK,
        is_drawn_XK=is_drawn_XK,
    )


def laws_at(drafts: Drafts, one: Family) -> tuple[Tensor, Tensor]:
    """The rows of p and q at these nodes, [X, V] each."""
    assert drafts.q_BRV is not None
    p_XV = rows.rows_at(drafts.p_BNV, one.round_X, one.node_X)
    return p_XV, rows.rows_at(drafts.q_BRV, one.round_X, one.row_X)


def left_masses(q_XK: Tensor, outside_X: Tensor) -> Tensor:
    """The mass of q left for each child, added up from the last: nothing cancels; at first all."""
    left_XK = outside_X[:, None] + q_XK.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([torch.ones_like(left_XK[:, :1]), left_XK[:, 1:]], 1)


def stands(coin: Tensor, share: Tensor, mass: Tensor, q: Tensor, left: Tensor) -> Tensor:
    """Whether coin < (R(x)/m)/(q(x)/l), without a division."""
    return coin * mass * q < share * left


def reduced_factor(factor_X: Tensor, mass_X: Tensor, left_X: Tensor) -> Tensor:
    """The factor after a refusal."""
    return factor_X + mass_X / left_X


def rest_weights(
    drafts: Drafts, one: Family, factor_X: Tensor, p_XV: Tensor, q_XV: Tensor
) -> Tensor:
    """The row of what is left, not normalised: [X, V]."""
    weights_XV = rows.excess(p_XV, q_XV, factor_X)
    if drafts.siblings is not Siblings.HYBRID:
        return weights_XV
    # Chosen siblings had no part in the law that was subtracted: their tokens keep all of p.
    is_chosen_XK = one.kin.is_there_XK & ~one.is_drawn_XK
    lost_XK = one.p_XK.to(p_XV.dtype) - weights_XV.gather(-1, one.kin.tokens_XK)
    return weights_XV.scatter_add_(-1, one.kin.tokens_XK, lost_XK * is_chosen_XK)


def draw_rest(
    drafts: Drafts, noise: Noise, one: Family, factor_X: Tensor, is_reduced_X: Tensor
) -> Drawn:
    """Draw from what is left, from p where rounding left nothing."""
    p_XV, q_XV = laws_at(drafts, one)
    weights_XV = rest_weights(drafts, one, factor_X, p_XV, q_XV)
    is_empty_X = weights_XV.amax(-1) <= 0
    weights_XV.addcmul_(p_XV, is_empty_X[:, None].to(p_XV.dtype))
    depth_X = drafts.shapes.depths_BN[one.round_X, one.node_X]
    coin_X = last_coin(noise, one.round_X, depth_X, is_reduced_X)
    return Drawn(rows.draw(weights_XV, coin_X), is_empty_X)


def recursive(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rules R1, R4 and R5: the drawn children in turn, then a draw of what is left."""
    if drafts.siblings is Siblings.NONE:
        return match(drafts, noise)
    num_nodes, round_B = drafts.tokens_BN.shape[1], drafts.rounds_B
    width, nodes = drafts.shapes.children_BNK.shape[-1], nodes_of(drafts, noise)
    next_BM = only_children(drafts, nodes) if 1 in drafts.shapes.widths else None
    one_B = torch.ones_like(nodes.p_BN[:, 0])
    factor_B, num_degenerate_B = one_B, torch.zeros_like(round_B)

    def settle(depth: int, node_B: Tensor) -> Tensor:
        nonlocal factor_B, num_degenerate_B
        is_walking_B = node_B < num_nodes
        if next_BM is not None and drafts.shapes.widths[depth] == 1:
            # An only child that is refused leaves [p - q]+.
            factor_B = torch.where(is_walking_B, one_B, factor_B)
            return rows.at(next_BM, node_B)
        here_B = torch.where(is_walking_B, node_B, 0)
        one = family_of(drafts, nodes, round_B, here_B, drafts.shapes.widths[depth])
        found = judge(drafts, one)
        num_degenerate_B = num_degenerate_B + found.num_degenerate_X * is_walking_B
        factor_B = torch.where(is_walking_B, found.factor_X, factor_B)
        return torch.where(is_walking_B, found.child_X, num_nodes)

    path = walk(drafts, settle)
    one = family_of(drafts, nodes, round_B, path.last_B, width)
    is_reduced_B = one.kin.is_there_XK[:, 0]
    drawn = draw_rest(drafts, noise, one, factor_B * is_reduced_B, is_reduced_B)
    num_degenerate_B = num_degenerate_B + drawn.is_empty_X
    return emitted(drafts, path, drawn.token_X, num_degenerate_B, nodes.is_impossible_B)


def only_children(drafts: Drafts, nodes: Nodes) -> Tensor:
    """Every node's first child where it stands against p, N where not, and at N: [B, N + 1]."""
    kids_BN = drafts.shapes.children_BNK[..., 0]
    num_nodes, index_BN = kids_BN.shape[1], kids_BN.clamp(min=0)
    one_B1 = torch.ones_like(nodes.p_BN[:, :1])
    is_on_BN = stands(nodes.coins_BN, nodes.p_BN, one_B1, nodes.q_BN, one_B1)
    next_BN = torch.where(is_on_BN.gather(1, index_BN) & (kids_BN >= 0), kids_BN, num_nodes)
    return torch.cat([next_BN, torch.full_like(next_BN[:, :1], num_nodes)], 1)


def judge(drafts: Drafts, one: Family) -> Judged:
    """Try the children of each node in turn, all of them drawn."""
    num_nodes = drafts.tokens_BN.shape[1]
    factor_X, mass_X = torch.zeros_like(one.q_XK[:, 0]), torch.ones_like(one.q_XK[:, 0])
    is_open_X, child_X = one.node_X >= 0, torch.full_like(one.node_X, num_nodes)
    num_degenerate_X, (p_XV, q_XV) = torch.zeros_like(child_X), laws_at(drafts, one)
    work_XV = torch.empty_like(p_XV)
    columns = (one.p_XK, one.q_XK, one.left_XK, one.coins_XK, one.kin.nodes_XK, one.is_drawn_XK)
    for p_X, q_X, left_X, coin_X, node_X, is_drawn_X in zip(
        *(column.unbind(1) for column in columns), strict=True
    ):
        is_tried_X = is_open_X & is_drawn_X
        share_X = (p_X - factor_X * q_X).relu()
        is_on_X = is_tried_X & stands(coin_X, share_X, mass_X, q_X, left_X)
        child_X = torch.where(is_on_X, node_X, child_X)
        is_open_X = is_tried_X & ~is_on_X
        new_factor_X = reduced_factor(factor_X, mass_X, left_X)
        new_mass_X = rows.mass(rows.excess(p_XV, q_XV, new_factor_X, work_XV))
        is_less_X = is_open_X & (new_mass_X > 0)
        num_degenerate_X = num_degenerate_X + (is_open_X ^ is_less_X)
        mass_X = torch.where(is_less_X, new_mass_X, mass_X)
        factor_X = torch.where(is_less_X, new_factor_X, factor_X)
    return Judged(child_X, factor_X, num_degenerate_X)


def hybrid(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rule R7: the one drawn child first; what it leaves is drawn from among the chosen too."""
    if drafts.siblings is not Siblings.HYBRID:
        return recursive(drafts, noise)
    num_nodes, round_B = drafts.tokens_BN.shape[1], drafts.rounds_B
    num_degenerate_B, nodes = torch.zeros_like(round_B), nodes_of(drafts, noise)

    def settle(depth: int, node_B: Tensor) -> Tensor:
        nonlocal num_degenerate_B
        is_walking_B = node_B < num_nodes
        here_B = torch.where(is_walking_B, node_B, 0)
        one = family_of(drafts, nodes, round_B, here_B, drafts.shapes.widths[depth])
        found = judge_one(drafts, one)
        drawn = draw_rest(drafts, noise, one, found.factor_X, one.is_drawn_XK.any(-1))
        is_chosen_BK = one.kin.is_there_XK & ~one.is_drawn_XK
        is_it_BK = is_chosen_BK & (one.kin.tokens_XK == drawn.token_X[:, None])
        chosen_B = torch.where(is_it_BK, one.kin.nodes_XK, num_nodes).amin(-1)
        is_open_B = found.child_X == num_nodes
        child_B = torch.where(is_open_B, chosen_B, found.child_X)
        is_on_B = is_walking_B & (child_B < num_nodes)
        num_degenerate_B = num_degenerate_B + (drawn.is_empty_X & is_on_B & is_open_B)
        return torch.where(is_on_B, child_B, num_nodes)

    path = walk(drafts, settle)
    one = family_of(drafts, nodes, round_B, path.last_B, drafts.shapes.children_BNK.shape[-1])
    found = judge_one(drafts, one)
    drawn = draw_rest(drafts, noise, one, found.factor_X, one.is_drawn_XK.any(-1))
    num_degenerate_B = num_degenerate_B + drawn.is_empty_X
    return emitted(drafts, path, drawn.token_X, num_degenerate_B, nodes.is_impossible_B)


def judge_one(drafts: Drafts, one: Family) -> Judged:
    """Judge the only drawn child, whatever its slot."""
    num_nodes = drafts.tokens_BN.shape[1]
    slot_X1 = one.is_drawn_XK.int().argmax(-1, keepdim=True)
    coin_X1, p_X1, q_X1, left_X1, is_tried_X1, node_X1 = (
        table.gather(1, slot_X1)
        for table in (
            *(one.coins_XK, one.p_XK, one.q_XK, one.left_XK),
            *(one.is_drawn_XK, one.kin.nodes_XK),
        )
    )
    mass_X1 = torch.ones_like(p_X1)
    is_on_X1 = is_tried_X1 & stands(coin_X1, p_X1, mass_X1, q_X1, left_X1)
    child_X1 = torch.where(is_on_X1, node_X1, num_nodes)
    is_refused_X1 = is_tried_X1 & ~is_on_X1
    factor_X1 = reduced_factor(torch.zeros_like(p_X1), mass_X1, left_X1)
    return Judged(
        child_X=child_X1[:, 0],
        factor_X=torch.where(is_refused_X1, factor_X1, 0.0)[:, 0],
        num_degenerate_X=torch.zeros_like(child_X1[:, 0]),
    )
