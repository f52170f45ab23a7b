"""Batched block and traversal verification, R9 and R10: all weights first, then all coins.

A node's coin is looked at only if all nodes left before it have refused, and its weight depends on
just that: so the weights are functions of p, q and the tokens alone. Of the nodes whose coin is
below their weight the one that is left first stands, depth first, the root last.
Dimensions: B rounds, N nodes, V vocabulary, K children of a node.
"""

import torch
from torch import Tensor

from outrider.eval.batched import rows
from outrider.eval.batched.drafts import Drafts, Noise, Verdicts
from outrider.eval.batched.reach import Weights, refuse_all, tree_weights, weight_after
from outrider.eval.batched.residuals import Nodes, draw_rest, family_of, laws_at, nodes_of
from outrider.eval.batched.walk import Path, emitted, match
from outrider.eval.rules.verdict import Siblings


def traversal(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rules R9 and R10: leaf to root, depth first."""
    if drafts.siblings is Siblings.NONE or not drafts.shapes.widths:
        return match(drafts, noise)
    nodes, is_chain = nodes_of(drafts, noise), drafts.shapes.is_chain
    weights = chain_weights(drafts, nodes) if is_chain else tree_weights(drafts, nodes)
    last_B = first_standing(drafts, noise.coins_BN < weights.stands_BN)
    path, width = path_to(drafts, last_B), drafts.shapes.children_BNK.shape[-1]
    # Once more where the walk ended, for what is left there.
    one = family_of(drafts, nodes, drafts.rounds_B, last_B, width)
    after = refuse_all(one, rows.at(weights.reached_BN, last_B), [[laws_at(drafts, one)]] * width)
    drawn = draw_rest(drafts, noise, one, after.factor_X, one.kin.is_there_XK[:, 0])
    # Only the root's children before the one on the path have been refused.
    root_kids_BK = drafts.shapes.children_BNK[:, 0, : weights.num_degenerate_BK.shape[1]]
    is_refused_BK = root_kids_BK < path.nodes_BD[:, :1]
    num_degenerate_B = (weights.num_degenerate_BK * is_refused_BK).sum(-1) + drawn.is_empty_X
    return emitted(drafts, path, drawn.token_X, num_degenerate_B, nodes.is_impossible_B)


def first_standing(drafts: Drafts, is_on_BN: Tensor) -> Tensor:
    """Of the nodes that would stand, the root among them, the one that is left first: [B]."""
    ranks_BN = drafts.shapes.ranks_BN
    num_nodes = ranks_BN.shape[1]
    is_on_BN = is_on_BN | (torch.arange(num_nodes, device=ranks_BN.device) == 0)
    return torch.where(is_on_BN, ranks_BN, num_nodes + 1).argmin(-1)


def path_to(drafts: Drafts, last_B: Tensor) -> Path:
    """The walk that ended at these nodes."""
    shapes, num_nodes = drafts.shapes, drafts.tokens_BN.shape[1]
    lengths_B = rows.at(shapes.depths_BN, last_B)
    nodes: list[Tensor] = []
    node_B = last_B
    for depth in range(len(shapes.widths), 0, -1):
        is_here_B = lengths_B >= depth
        nodes.append(torch.where(is_here_B, node_B, num_nodes))
        node_B = torch.where(is_here_B, rows.at(shapes.parents_BN, node_B).clamp(min=0), node_B)
    return Path(torch.stack(nodes[::-1], 1), lengths_B, last_B)


def chain_weights(drafts: Drafts, nodes: Nodes) -> Weights:
    """The weights of all nodes of chains: node i + 1 is the only child of node i."""
    num_rounds, num_nodes = drafts.tokens_BN.shape
    has_child_BN = drafts.shapes.children_BNK[..., 0] >= 0
    ratios_BN = torch.where(nodes.q_BN > 0, nodes.p_BN / nodes.q_BN, 0.0)
    reached = [torch.ones_like(nodes.p_BN[:, 0])]
    for ratio_B in ratios_BN.unbind(1)[1:]:
        reached.append((reached[-1] * ratio_B).clamp(max=1.0))
    reached_BN = torch.stack(reached, 1)
    factor_BN = 1 / torch.where(reached_BN > 0, reached_BN, 1.0)
    ids_BN = torch.arange(num_nodes, device=factor_BN.device).expand(num_rounds, -1)
    row_BN = drafts.row_of(drafts.rounds_B[:, None], ids_BN)
    sums_BN = reached_BN * torch.where(has_child_BN, chain_masses(drafts, row_BN, factor_BN), 0.0)
    stands_BN = torch.where(has_child_BN, weight_after(sums_BN, reached_BN), reached_BN)
    is_empty_BN = has_child_BN & (sums_BN <= 0)
    return Weights(reached_BN, stands_BN, is_empty_BN[:, :1].long())


def chain_masses(drafts: Drafts, row_BN: Tensor, factor_BN: Tensor) -> Tensor:
    """The sum of [p - c q]+ at every node but the last, a few rows at a time: float64 [B, N]."""
    p_BNV, q_BRV = drafts.p_BNV, drafts.q_BRV
    masses: list[Tensor] = []
    assert q_BRV is not None
    num_inner, step = factor_BN.shape[1] - 1, rows.rows_at_once(p_BNV)
    for first in range(0, num_inner, step):
        these = slice(first, min(first + step, num_inner))
        q_BXV = q_BRV[:, these] if drafts.rows_BN is None else _gathered(q_BRV, row_BN[:, these])
        masses.append(rows.mass(rows.excess(p_BNV[:, these], q_BXV, factor_BN[:, these])))
    return torch.cat([*masses, torch.zeros_like(factor_BN[:, :1])], 1)


def _gathered(laws_BRV: Tensor, row_BX: Tensor) -> Tensor:
    round_B1 = torch.arange(len(row_BX), device=row_BX.device)[:, None]
    flat_XV = rows.rows_at(laws_BRV, round_B1.expand_as(row_BX).flatten(), row_BX.flatten())
    return flat_XV.view(*row_BX.shape, -1)
