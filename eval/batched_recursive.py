"""Batched recursive rejection, R1, R4, R5 and R7: what a refusal leaves is [p - c q]+, a factor c.

With R = [p - c q]+ of mass m, and D the law of the next child, q without the elder siblings'
tokens over the mass l that is left of it, a refusal leaves [R/m - D]+: [p - (c + m/l) q]+ up to a
constant, and at an elder sibling's token what it was. So a residual is one number for the row and
one for each elder sibling. Dimensions: B rounds, N nodes, V vocabulary, K children of a node.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.eval import batched_rows as rows
from outrider.eval.batched_drafts import Drafts, Noise, Verdicts
from outrider.eval.batched_walk import Kin, emitted, kin_of, last_coin, match, walk
from outrider.eval.verdict import Siblings


class Family(NamedTuple):
    """The children of one node of each round, and all that they are judged by."""

    kin: Kin
    coins_BK: Tensor
    p_BK: Tensor
    q_BK: Tensor
    left_BK: Tensor
    """The mass left of q when each child was drawn."""
    is_drawn_BK: Tensor
    row_B: Tensor
    """The row of q that they were drawn from."""


class Rest(NamedTuple):
    """What is left of p: [p - c q]+, but for the tokens of elder siblings."""

    factor_B: Tensor
    frozen_BK: Tensor
    """The factor at each child's token since it left the law; infinite while it has not."""


class Judged(NamedTuple):
    """What came of the children of one node of each round."""

    child_B: Tensor
    """The child that stands, or N."""
    rest: Rest
    is_reduced_B: Tensor
    num_degenerate_B: Tensor


def family_of(drafts: Drafts, noise: Noise, node_B: Tensor, width: int) -> Family:
    """Look up the numbers of the first `width` children; reads the row of q if they left it."""
    assert drafts.q_BRV is not None
    assert drafts.rows_BN is not None
    kin, row_B = kin_of(drafts, node_B, width), rows.at(drafts.rows_BN, node_B)
    q_BK = rows.shares_at(drafts.q_BRV, row_B[:, None], kin.tokens_BK)
    q_BK = torch.where(kin.is_there_BK, q_BK, 0.0)
    left_BK = torch.ones_like(q_BK)
    if drafts.is_judged_without and width > 1:
        q_BV = rows.rows_at(drafts.q_BRV, row_B)
        left_BK = left_masses(q_BK, rows.mass_outside(q_BV, kin.tokens_BK, kin.is_there_BK))
    is_drawn_BK = kin.is_there_BK
    if drafts.is_drawn_BN is not None:
        is_drawn_BK = is_drawn_BK & drafts.is_drawn_BN.gather(1, kin.index_BK)
    return Family(
        kin=kin,
        coins_BK=noise.coins_BN.gather(1, kin.index_BK),
        p_BK=rows.shares_at(drafts.p_BNV, node_B[:, None], kin.tokens_BK),
        q_BK=q_BK,
        left_BK=left_BK,
        is_drawn_BK=is_drawn_BK,
        row_B=row_B,
    )


def left_masses(q_BK: Tensor, outside_B: Tensor) -> Tensor:
    """The mass of q left for each child, added up from the last: nothing cancels; at first all."""
    left_BK = outside_B[:, None] + q_BK.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([torch.ones_like(left_BK[:, :1]), left_BK[:, 1:]], 1)


def is_impossible(drafts: Drafts) -> Tensor:
    """Which rounds have a drawn token that its law cannot produce: [B]."""
    assert drafts.q_BRV is not None
    assert drafts.rows_BN is not None
    parents_BN = drafts.shapes.parents_BN
    is_drawn_BN = parents_BN >= 0
    if drafts.is_drawn_BN is not None:
        is_drawn_BN = is_drawn_BN & drafts.is_drawn_BN
    rows_BN = drafts.rows_BN.gather(1, parents_BN.clamp(min=0))
    tokens_BN = torch.where(is_drawn_BN, drafts.tokens_BN, 0)
    is_bad_BN = is_drawn_BN & (rows.shares_at(drafts.q_BRV, rows_BN, tokens_BN) <= 0)
    if drafts.is_judged_without and not drafts.shapes.is_chain:
        kids_BNK = drafts.shapes.children_BNK
        tokens_BNK = drafts.tokens_BN.gather(1, kids_BNK.clamp(min=0).flatten(1)).view_as(kids_BNK)
        is_bad_BN = is_bad_BN | rows.is_repeated(tokens_BNK, kids_BNK >= 0).any(-1)
    return is_bad_BN.any(-1)


def stands(coin: Tensor, share: Tensor, mass: Tensor, q: Tensor, left: Tensor) -> Tensor:
    """Whether coin < (R(x)/m)/(q(x)/l), without a division."""
    return coin * mass * q < share * left


def reduced_factor(factor_B: Tensor, mass_B: Tensor, left_B: Tensor) -> Tensor:
    """The factor after a refusal."""
    return factor_B + mass_B / left_B


def kept_shares(one: Family, rest: Rest) -> Tensor:
    """What the children's tokens have beyond [p - c q]+, [B, K]; never below zero."""
    factor_B1 = rest.factor_B[:, None]
    kept_BK = (one.p_BK - torch.minimum(rest.frozen_BK, factor_B1) * one.q_BK).relu()
    return torch.where(one.kin.is_there_BK, kept_BK - (one.p_BK - factor_B1 * one.q_BK).relu(), 0.0)


def rest_weights(drafts: Drafts, node_B: Tensor, one: Family, rest: Rest) -> Tensor:
    """The row of what is left, not normalised: [B, V]."""
    assert drafts.q_BRV is not None
    p_BV, q_BV = rows.rows_at(drafts.p_BNV, node_B), rows.rows_at(drafts.q_BRV, one.row_B)
    weights_BV = rows.excess(p_BV, q_BV, rest.factor_B)
    if not drafts.is_judged_without or one.q_BK.shape[1] == 1:
        return weights_BV
    return weights_BV.scatter_add(-1, one.kin.tokens_BK, kept_shares(one, rest).to(p_BV.dtype))


def recursive(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rules R1, R4 and R5: the drawn children in turn, then a draw of what is left."""
    if drafts.siblings is Siblings.NONE:
        return match(drafts, noise)
    num_nodes = drafts.tokens_BN.shape[1]
    next_BM = _only_children(drafts, noise)
    num_degenerate_B = torch.zeros_like(drafts.tokens_BN[:, 0])

    def settle(depth: int, node_B: Tensor) -> Tensor:
        nonlocal num_degenerate_B
        width = drafts.shapes.widths[depth]
        if width == 1:
            return rows.at(next_BM, node_B)
        is_walking_B = node_B < num_nodes
        here_B = torch.where(is_walking_B, node_B, 0)
        found = judge(drafts, here_B, family_of(drafts, noise, here_B, width))
        is_on_B = is_walking_B & (found.child_B < num_nodes)
        num_degenerate_B = num_degenerate_B + found.num_degenerate_B * is_on_B
        return torch.where(is_on_B, found.child_B, num_nodes)

    path = walk(drafts, settle)
    # Once more where the walk ended, for what is left there.
    one = family_of(drafts, noise, path.last_B, drafts.shapes.children_BNK.shape[-1])
    found = judge(drafts, path.last_B, one)
    weights_BV = rest_weights(drafts, path.last_B, one, found.rest)
    is_empty_B = weights_BV.amax(-1) <= 0
    weights_BV = torch.where(
        is_empty_B[:, None], rows.rows_at(drafts.p_BNV, path.last_B), weights_BV
    )
    token_B = rows.draw(weights_BV, last_coin(noise, path, found.is_reduced_B))
    num_degenerate_B = num_degenerate_B + found.num_degenerate_B + is_empty_B
    return emitted(drafts, path, token_B, num_degenerate_B, is_impossible(drafts))


def _only_children(drafts: Drafts, noise: Noise) -> Tensor:
    """Every node's first child where it stands against p, N where not, and at N: [B, N + 1]."""
    assert drafts.q_BRV is not None
    assert drafts.rows_BN is not None
    kids_BN = drafts.shapes.children_BNK[..., 0]
    num_nodes, index_BN = kids_BN.shape[1], kids_BN.clamp(min=0)
    tokens_BN = torch.where(kids_BN >= 0, drafts.tokens_BN.gather(1, index_BN), 0)
    ids_1N = torch.arange(num_nodes, device=kids_BN.device)[None]
    p_BN = rows.shares_at(drafts.p_BNV, ids_1N, tokens_BN)
    q_BN = rows.shares_at(drafts.q_BRV, drafts.rows_BN, tokens_BN)
    one = torch.ones_like(p_BN[:, :1])
    is_on_BN = stands(noise.coins_BN.gather(1, index_BN), p_BN, one, q_BN, one) & (kids_BN >= 0)
    next_BN = torch.where(is_on_BN, kids_BN, num_nodes)
    return torch.cat([next_BN, torch.full_like(next_BN[:, :1], num_nodes)], 1)


def judge(drafts: Drafts, node_B: Tensor, one: Family) -> Judged:
    """Try the drawn children of each round's node in turn."""
    assert drafts.q_BRV is not None
    num_nodes, width = drafts.tokens_BN.shape[1], one.q_BK.shape[1]
    rest = Rest(torch.zeros_like(one.coins_BK[:, 0]), torch.full_like(one.coins_BK, torch.inf))
    mass_B, child_B = torch.ones_like(rest.factor_B), torch.full_like(node_B, num_nodes)
    num_degenerate_B, is_reduced_B = torch.zeros_like(node_B), torch.zeros_like(node_B) > 0
    if width > 1:
        p_BV, q_BV = rows.rows_at(drafts.p_BNV, node_B), rows.rows_at(drafts.q_BRV, one.row_B)
    for slot in range(width):
        q_B, left_B = one.q_BK[:, slot], one.left_BK[:, slot]
        share_B = (one.p_BK[:, slot] - rest.factor_B * q_B).relu()
        is_tried_B = one.is_drawn_BK[:, slot] & (child_B == num_nodes)
        is_on_B = is_tried_B & stands(one.coins_BK[:, slot], share_B, mass_B, q_B, left_B)
        child_B = torch.where(is_on_B, one.kin.nodes_BK[:, slot], child_B)
        is_refused_B = is_tried_B & ~is_on_B
        is_reduced_B = is_reduced_B | is_refused_B
        factor_B = reduced_factor(rest.factor_B, mass_B, left_B)
        if width > 1:  # an only child's residual is looked at where it is drawn from
            less_B = rows.mass(rows.excess(p_BV, q_BV, factor_B))
            if drafts.is_judged_without:
                less_B = less_B + kept_shares(one, Rest(factor_B, rest.frozen_BK)).sum(-1)
            num_degenerate_B = num_degenerate_B + (is_refused_B & (less_B <= 0))
            is_refused_B = is_refused_B & (less_B > 0)
            mass_B = torch.where(is_refused_B, less_B, mass_B)
        factor_B = torch.where(is_refused_B, factor_B, rest.factor_B)
        rest = Rest(factor_B, _frozen(drafts, rest.frozen_BK, factor_B, slot))
    return Judged(child_B, rest, is_reduced_B, num_degenerate_B)


def _frozen(drafts: Drafts, frozen_BK: Tensor, factor_B: Tensor, slot: int) -> Tensor:
    """This slot's token stays at the factor that it has now, where it leaves the law."""
    if not drafts.is_judged_without:
        return frozen_BK
    is_it_K = torch.arange(frozen_BK.shape[1], device=frozen_BK.device) == slot
    return torch.where(is_it_K, factor_B[:, None], frozen_BK)


def hybrid(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rule R7: the one drawn child first; what it leaves is drawn from among the chosen too."""
    if drafts.siblings is not Siblings.HYBRID:
        return recursive(drafts, noise)
    num_nodes = drafts.tokens_BN.shape[1]

    def token_after(node_B: Tensor, width: int) -> tuple[Judged, Kin, Tensor]:
        one = family_of(drafts, noise, node_B, width)
        depth_B = rows.at(drafts.shapes.depths_BN, node_B)
        found = judge_one(drafts, one)
        weights_BV = rest_weights(drafts, node_B, one, found.rest)
        is_empty_B = weights_BV.amax(-1) <= 0
        p_BV = rows.rows_at(drafts.p_BNV, node_B)
        weights_BV = torch.where(is_empty_B[:, None], p_BV, weights_BV)
        coin_B = torch.where(
            found.is_reduced_B, rows.at(noise.rests_BE, depth_B), rows.at(noise.targets_BE, depth_B)
        )
        counted = found._replace(num_degenerate_B=is_empty_B.long())
        return counted, one.kin, rows.draw(weights_BV, coin_B)

    num_degenerate_B = torch.zeros_like(drafts.tokens_BN[:, 0])

    def settle(depth: int, node_B: Tensor) -> Tensor:
        nonlocal num_degenerate_B
        is_walking_B = node_B < num_nodes
        here_B = torch.where(is_walking_B, node_B, 0)
        found, kin, token_B = token_after(here_B, drafts.shapes.widths[depth])
        is_drawn_BK = torch.zeros_like(kin.is_there_BK)
        if drafts.is_drawn_BN is not None:
            is_drawn_BK = drafts.is_drawn_BN.gather(1, kin.index_BK)
        is_it_BK = kin.is_there_BK & ~is_drawn_BK & (kin.tokens_BK == token_B[:, None])
        chosen_B = torch.where(is_it_BK, kin.nodes_BK, num_nodes).amin(-1)
        is_refused_B = found.child_B == num_nodes
        child_B = torch.where(is_refused_B, chosen_B, found.child_B)
        is_on_B = is_walking_B & (child_B < num_nodes)
        num_degenerate_B = num_degenerate_B + found.num_degenerate_B * (is_on_B & is_refused_B)
        return torch.where(is_on_B, child_B, num_nodes)

    path = walk(drafts, settle)
    found, _, token_B = token_after(path.last_B, drafts.shapes.children_BNK.shape[-1])
    num_degenerate_B = num_degenerate_B + found.num_degenerate_B
    return emitted(drafts, path, token_B, num_degenerate_B, is_impossible(drafts))


def judge_one(drafts: Drafts, one: Family) -> Judged:
    """Judge the only drawn child, whatever its slot; elder siblings keep the whole of p."""
    num_nodes = drafts.tokens_BN.shape[1]
    slot_B1 = one.is_drawn_BK.int().argmax(-1, keepdim=True)
    is_tried_B1 = one.is_drawn_BK.gather(1, slot_B1)
    coin_B1, p_B1, q_B1, left_B1 = (
        table.gather(1, slot_B1) for table in (one.coins_BK, one.p_BK, one.q_BK, one.left_BK)
    )
    mass_B1 = torch.ones_like(p_B1)
    is_on_B1 = is_tried_B1 & stands(coin_B1, p_B1, mass_B1, q_B1, left_B1)
    child_B1 = torch.where(is_on_B1, one.kin.nodes_BK.gather(1, slot_B1), num_nodes)
    is_refused_B1 = is_tried_B1 & ~is_on_B1
    zero_B1 = torch.zeros_like(p_B1)
    factor_B1 = torch.where(is_refused_B1, reduced_factor(zero_B1, mass_B1, left_B1), 0.0)
    is_elder_BK = torch.arange(one.q_BK.shape[1], device=slot_B1.device) < slot_B1
    frozen_BK = torch.where(is_elder_BK, 0.0, torch.inf)
    return Judged(
        child_B=child_B1[:, 0],
        rest=Rest(factor_B1[:, 0], frozen_BK),
        is_reduced_B=is_refused_B1[:, 0],
        num_degenerate_B=torch.zeros_like(child_B1[:, 0]),
    )
