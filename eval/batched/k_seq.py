"""Batched K-SEQ, R6: the divisor rho is found in a fixed number of passes over the visited rows.

Dimensions: B rounds, V vocabulary, K children of a node.
"""

import torch
from torch import Tensor

from outrider.eval.batched import rows
from outrider.eval.batched.drafts import Drafts, Noise, Verdicts
from outrider.eval.batched.residuals import family_of, laws_at, nodes_of, only_children
from outrider.eval.batched.walk import emitted, last_coin, match, walk
from outrider.eval.rules.verdict import Siblings
from outrider.eval.rules.walk import RHO_TICKS


def k_sequential(drafts: Drafts, noise: Noise, num_steps: int = 0) -> Verdicts:
    """Rule R6, SpecTr's K-SEQ: each child stands with min(1, p/(rho q)).

    Its decisions are the certified rule's where `num_steps` passes find that rule's rho, and else
    those of a slightly larger rho, for which the rule is exact, too. By default so many that rho is
    within a thousandth for vocabularies of thousands of tokens: 5 for two children, 7 for ten.
    """
    if drafts.siblings is Siblings.NONE:
        return match(drafts, noise)
    num_nodes, round_B = drafts.tokens_BN.shape[1], drafts.rounds_B
    nodes = nodes_of(drafts, noise)
    next_BM = only_children(drafts, nodes) if 1 in drafts.shapes.widths else None
    last_rho_B = torch.ones_like(noise.coins_BN[:, 0])

    def settle(depth: int, node_B: Tensor) -> Tensor:
        nonlocal last_rho_B
        width = drafts.shapes.widths[depth]
        if next_BM is not None and width == 1:
            return rows.at(next_BM, node_B)
        is_walking_B = node_B < num_nodes
        here_B = torch.where(is_walking_B, node_B, 0)
        one = family_of(drafts, nodes, round_B, here_B, width)
        rho_B = divisor(
            *laws_at(drafts, one), one.kin.is_there_XK.sum(-1), num_steps or default_steps(width)
        )
        last_rho_B = torch.where(is_walking_B, rho_B, last_rho_B)
        is_on_XK = one.coins_XK * rho_B[:, None] * one.q_XK < one.p_XK
        is_on_XK = is_on_XK & one.kin.is_there_XK & is_walking_B[:, None]
        return torch.where(is_on_XK, one.kin.nodes_XK, num_nodes).amin(-1)

    path = walk(drafts, settle)
    one = family_of(drafts, nodes, round_B, path.last_B, drafts.shapes.children_BNK.shape[-1])
    count_B = one.kin.is_there_XK.sum(-1)
    p_BV, q_BV = laws_at(drafts, one)
    rest_BV = rest_weights(p_BV, q_BV, torch.where(count_B > 1, last_rho_B, 1.0), count_B)
    is_empty_B = rest_BV.amax(-1) <= 0
    rest_BV = torch.addcmul(rest_BV, p_BV, is_empty_B[:, None].to(p_BV.dtype))
    token_B = rows.draw(rest_BV, last_coin(noise, round_B, path.lengths_B, count_B > 0))
    return emitted(drafts, path, token_B, is_empty_B.long(), nodes.is_impossible_B)


def default_steps(width: int) -> int:
    """Passes in search of rho for nodes of so many children."""
    return 3 + width.bit_length()


def rest_weights(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor, count_B: Tensor) -> Tensor:
    """P - min(p/rho, q) (1 - (1 - beta)^K)/beta, above zero: [B, V]; p itself for no children."""
    kept_BV = torch.minimum(p_BV / rho_B[:, None].to(p_BV.dtype), q_BV)
    beta_B = rows.mass(kept_BV)
    share_B = torch.where(beta_B > 0, 1 - (1 - beta_B) ** count_B, 0.0)
    return rows.excess(p_BV, kept_BV, share_B / torch.where(beta_B > 0, beta_B, 1.0))


def divisor(p_BV: Tensor, q_BV: Tensor, count_B: Tensor, num_steps: int) -> Tensor:
    """The least multiple of 2^-16 at which K-SEQ is exact, or a larger one: float64 [B].

    Exact for any rho with spare(rho) = rho beta - 1 + (1 - beta)^K >= 0, beta = sum min(p/rho, q).
    The root is between 1 and K: regula falsi with the Illinois rule, then the tick above the lower
    end, if it is enough. Only a rho that was seen to be enough is returned.
    """
    work_BV = torch.empty_like(p_BV)

    def spare(rho_B: Tensor) -> Tensor:
        beta_B = beta(p_BV, q_BV, rho_B, work_BV)
        return rho_B * beta_B - 1 + (1 - beta_B) ** count_B

    most_B = count_B.clamp(min=1).double()
    low_B, high_B = torch.ones_like(most_B), most_B
    under_B, over_B = spare(low_B), spare(high_B)
    is_one_B = under_B >= 0
    was_enough_B = None
    for _ in range(num_steps):
        slope_B = (over_B - under_B).clamp(min=1e-300)
        rho_B = torch.maximum(high_B - (high_B - low_B) * over_B / slope_B, low_B)
        found_B = spare(rho_B)
        is_enough_B = found_B >= 0
        if was_enough_B is not None:  # the end that stays a second time counts half (Illinois)
            halved_B = 1 - 0.5 * (is_enough_B == was_enough_B)
            under_B, over_B = under_B * halved_B, over_B * halved_B
        high_B, low_B = (
            torch.where(is_enough_B, rho_B, high_B),
            torch.where(is_enough_B, low_B, rho_B),
        )
        under_B, over_B = (
            torch.where(is_enough_B, under_B, found_B),
            torch.where(is_enough_B, found_B, over_B),
        )
        was_enough_B = is_enough_B
    tick_B = (low_B * RHO_TICKS).floor().add(1) / RHO_TICKS
    top_B = torch.minimum((high_B * RHO_TICKS).ceil() / RHO_TICKS, most_B)
    rho_B = torch.where((tick_B < top_B) & (spare(tick_B) >= 0), tick_B, top_B)
    return torch.where(is_one_B, 1.0, rho_B)


def beta(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor, work_BV: Tensor) -> Tensor:
    """Sum of min(p/rho, q), float64 [B]; `work_BV` is overwritten."""
    torch.mul(p_BV, (1 / rho_B)[:, None].to(p_BV.dtype), out=work_BV)
    return rows.mass(torch.minimum(work_BV, q_BV, out=work_BV))
