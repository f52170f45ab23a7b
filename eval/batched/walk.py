"""Batched verification from the root down, R0 to R7: the rules of `outrider.eval.rules.walk`.

Each decides as its rule does on the same laws and noise. What a decision needs is looked up, not
scanned: a row of the vocabulary is read for a draw, for the sum of a residual that another child
is judged by, and once for all nodes where a rule needs every node's draw or sum.
Dimensions: B rounds, N nodes, V vocabulary, K children of a node, D depths, X any.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.draws import BLOCK, block_sums
from outrider.eval.batched import rows
from outrider.eval.batched.drafts import Drafts, Noise, Verdicts


class Path(NamedTuple):
    """Where the walks went."""

    nodes_BD: Tensor
    """The accepted nodes, N after the last."""
    lengths_B: Tensor
    last_B: Tensor
    """The node that each walk stopped at."""


def walk(drafts: Drafts, settle: Callable[[int, Tensor], Tensor]) -> Path:
    """Go down one depth after another until every round has stopped.

    `settle` takes a depth and each round's node, N for one that has stopped, and returns the child
    to go on to, or N.
    """
    num_rounds, num_nodes = drafts.tokens_BN.shape
    node_B = torch.zeros(num_rounds, dtype=torch.int64, device=drafts.p_BNV.device)
    nodes = [node_B]
    for depth in range(len(drafts.shapes.widths)):
        nodes.append(settle(depth, nodes[-1]))
    nodes_BE = torch.stack(nodes, dim=1)
    lengths_B = (nodes_BE < num_nodes).sum(-1) - 1
    return Path(nodes_BE[:, 1:], lengths_B, rows.at(nodes_BE, lengths_B))


def follow(drafts: Drafts, next_BN: Tensor) -> Path:
    """The walk where every node's next one is known already."""
    stopped_B1 = torch.full_like(next_BN[:, :1], next_BN.shape[1])
    next_BM = torch.cat([next_BN, stopped_B1], 1)
    return walk(drafts, lambda _, node_B: rows.at(next_BM, node_B))


def emitted(
    drafts: Drafts,
    path: Path,
    tokens_B: Tensor,
    num_degenerate_B: Tensor | None = None,
    is_defect_B: Tensor | None = None,
) -> Verdicts:
    """The verdicts of walks."""
    zero_B = torch.zeros_like(tokens_B)
    nodes_BD = torch.where(path.nodes_BD < drafts.tokens_BN.shape[1], path.nodes_BD, -1)
    return Verdicts(
        paths_BD=nodes_BD,
        lengths_B=path.lengths_B,
        tokens_B=tokens_B,
        num_degenerate_B=zero_B if num_degenerate_B is None else num_degenerate_B,
        is_defect_B=(tokens_B < 0) if is_defect_B is None else is_defect_B | (tokens_B < 0),
    )


def child_with(drafts: Drafts, tokens_BN: Tensor) -> Tensor:
    """Each node's first child with this token, or N: [B, N]."""
    family = _families(drafts)
    return _first_child(drafts, family.is_there_BNK & (family.tokens_BNK == tokens_BN[..., None]))


def _first_child(drafts: Drafts, is_it_BNK: Tensor) -> Tensor:
    """Each node's first child of these, or N; children are in node order."""
    num_nodes = drafts.tokens_BN.shape[1]
    return torch.where(is_it_BNK, drafts.shapes.children_BNK, num_nodes).amin(-1)


class _Families(NamedTuple):
    """The children of every node."""

    is_there_BNK: Tensor
    index_BNK: Tensor
    tokens_BNK: Tensor


def _families(drafts: Drafts) -> _Families:
    children_BNK = drafts.shapes.children_BNK
    index_BNK = children_BNK.clamp(min=0)
    tokens_BNK = drafts.tokens_BN.gather(1, index_BNK.flatten(1)).view_as(index_BNK)
    is_there_BNK = children_BNK >= 0
    return _Families(is_there_BNK, index_BNK, torch.where(is_there_BNK, tokens_BNK, 0))


def greedy(drafts: Drafts, noise: Noise) -> Verdicts:  # noqa: ARG001
    """Rule R0: follow the likeliest token, the lowest id among equals."""
    return _follow_tokens(drafts, rows.first_max(drafts.p_BNV))


def match(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rule R2: draw each node's token from p and continue while it was drafted."""
    coins_BN = noise.targets_BE.gather(1, drafts.shapes.depths_BN)
    return _follow_tokens(drafts, rows.draw(drafts.p_BNV, coins_BN))


def _follow_tokens(drafts: Drafts, tokens_BN: Tensor) -> Verdicts:
    path = follow(drafts, child_with(drafts, tokens_BN))
    return emitted(drafts, path, rows.at(tokens_BN, path.last_B))


def point_mass(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rule R3: the children in order, each with its share of what is left."""
    family = _families(drafts)
    shares_BNK = _shares(drafts, family)
    left_BNK = _left(shares_BNK, _p_outside(drafts))
    coins_BNK = noise.coins_BN.gather(1, family.index_BNK.flatten(1)).view_as(shares_BNK)
    return _draw_outside(
        drafts, noise, follow(drafts, _first_child(drafts, coins_BNK * left_BNK < shares_BNK))
    )


def one_coin(drafts: Drafts, noise: Noise) -> Verdicts:
    """Rule R3': one coin a node, on the first child whose cumulative p exceeds it."""
    family = _families(drafts)
    shares_BNK = _shares(drafts, family)
    sums_BNK = shares_BNK.cumsum(-1)
    total_BN = sums_BNK[..., -1] + _p_outside(drafts)
    coins_BN = noise.coins_BN.gather(1, family.index_BNK[..., 0])
    below_BN = torch.nextafter(total_BN, torch.zeros_like(total_BN))
    points_BN = torch.minimum(coins_BN * total_BN, below_BN)
    is_it_BNK = (sums_BNK > points_BN[..., None]) & (shares_BNK > 0)
    return _draw_outside(drafts, noise, follow(drafts, _first_child(drafts, is_it_BNK)))


def _shares(drafts: Drafts, family: _Families) -> Tensor:
    """The p of each child; a second sibling with a token already tried has none."""
    num_nodes = drafts.tokens_BN.shape[1]
    ids_BNK = torch.arange(num_nodes, device=drafts.p_BNV.device)[:, None].expand_as(
        family.tokens_BNK
    )
    shares_BNK = rows.shares_at(
        drafts.p_BNV, drafts.rounds_B, ids_BNK.flatten(1), family.tokens_BNK.flatten(1)
    ).view_as(family.tokens_BNK)
    is_lost_BNK = ~family.is_there_BNK | rows.is_repeated(family.tokens_BNK, family.is_there_BNK)
    return torch.where(is_lost_BNK, 0.0, shares_BNK)


def _left(shares_BXK: Tensor, outside_BX: Tensor) -> Tensor:
    """What is left before each slot, added up from the last: nothing cancels."""
    return outside_BX[..., None] + shares_BXK.flip(-1).cumsum(-1).flip(-1)


def mass_outside(drafts: Drafts, laws_BRV: Tensor, row_BN: Tensor) -> Tensor:
    """The mass of each node's row outside its children's tokens, float64 [B, N]; one pass.

    Only the blocks with a child in them are added up again, without it: nothing cancels.
    """
    block, vocab, round_B1 = BLOCK, laws_BRV.shape[-1], drafts.rounds_B[:, None]
    sums_BNG = block_sums(laws_BRV)[round_B1, row_BN]
    num_blocks, parents_BN = sums_BNG.shape[-1], drafts.shapes.parents_BN
    up_BN = parents_BN.clamp(min=0)
    tokens_BN = torch.where(parents_BN >= 0, drafts.tokens_BN, 0)
    first_BN = tokens_BN // block * block
    ids_BNW = first_BN[..., None] + torch.arange(block, device=first_BN.device)
    row_up_BN = row_BN.gather(1, up_BN)
    inside_BNW = laws_BRV[round_B1[..., None], row_up_BN[..., None], ids_BNW.clamp(max=vocab - 1)]
    # The siblings' places in this node's block; one column more for those that are elsewhere.
    family = _families(drafts)
    kin_BNK = up_BN[..., None].expand(-1, -1, family.tokens_BNK.shape[-1])
    places_BNK = family.tokens_BNK.gather(1, kin_BNK) - first_BN[..., None]
    is_in_BNK = (places_BNK >= 0) & (places_BNK < block) & family.is_there_BNK.gather(1, kin_BNK)
    is_kept_BNX = torch.ones(*first_BN.shape, block + 1, dtype=torch.bool, device=first_BN.device)
    is_kept_BNX = is_kept_BNX.scatter(-1, torch.where(is_in_BNK, places_BNK, block), value=False)
    is_kept_BNW = is_kept_BNX[..., :block] & (ids_BNW < vocab)
    again_BN = (inside_BNW * is_kept_BNW).sum(-1)
    # Siblings of one block write the same sum; a place more for nodes that are no children.
    flat_BX = torch.cat([sums_BNG.flatten(1), torch.zeros_like(sums_BNG[:, 0, :1])], 1)
    place_BN = up_BN * num_blocks + tokens_BN // block
    place_BN = torch.where(parents_BN >= 0, place_BN, flat_BX.shape[1] - 1)
    flat_BX = flat_BX.scatter(1, place_BN, again_BN)
    return flat_BX[:, :-1].view_as(sums_BNG).sum(-1).double()


def _p_outside(drafts: Drafts) -> Tensor:
    """The mass of p outside each node's children, [B, N]."""
    num_rounds, num_nodes = drafts.tokens_BN.shape
    ids_BN = torch.arange(num_nodes, device=drafts.p_BNV.device).expand(num_rounds, -1)
    return mass_outside(drafts, drafts.p_BNV, ids_BN)


def _draw_outside(drafts: Drafts, noise: Noise, path: Path) -> Verdicts:
    """End each walk with a draw from p without the children, all of them refused."""
    kin = kin_of(drafts, drafts.rounds_B, path.last_B, drafts.shapes.children_BNK.shape[-1])
    p_BV = rows.rows_at(drafts.p_BNV, drafts.rounds_B, path.last_B)
    rest_BV = rows.without(p_BV, kin.tokens_XK, kin.is_there_XK)
    coin_B = last_coin(noise, drafts.rounds_B, path.lengths_B, kin.is_there_XK[:, 0])
    token_B = rows.draw(rest_BV, coin_B)
    return emitted(drafts, path, token_B)


def last_coin(noise: Noise, round_X: Tensor, depth_X: Tensor, is_reduced_X: Tensor) -> Tensor:
    """The noise of a draw after this depth: after a rejection other than plain decoding's."""
    return torch.where(
        is_reduced_X, noise.rests_BE[round_X, depth_X], noise.targets_BE[round_X, depth_X]
    )


class Kin(NamedTuple):
    """The children of one node each."""

    nodes_XK: Tensor
    is_there_XK: Tensor
    index_XK: Tensor
    """As `nodes_XK`, 0 where there is none; so are the tokens."""
    tokens_XK: Tensor


def kin_of(drafts: Drafts, round_X: Tensor, node_X: Tensor, width: int) -> Kin:
    """The first `width` children of a node of a round each."""
    nodes_XK = drafts.shapes.children_BNK[round_X, node_X, :width]
    is_there_XK, index_XK = nodes_XK >= 0, nodes_XK.clamp(min=0)
    tokens_XK = torch.where(is_there_XK, drafts.tokens_BN[round_X[:, None], index_XK], 0)
    return Kin(nodes_XK, is_there_XK, index_XK, tokens_XK)
